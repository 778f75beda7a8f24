"""The command line of `python -m data.prepare`, and the settings it stands for."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields

from common.flags import FlagGroup
from common.help import HelpFormatter, Parser, positive_int, seed_number
from data.masking import UNITS
from data.preparation.executors import EXECUTORS
from data.preparation.instances import OBJECTIVES
from data.preparation.settings import Settings, default_predictions
from data.text.sources import LAYOUTS


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data.prepare",
        description="Turn text into HDF5 shards that BERT pretraining reads, and a tokenizer with them.",
        formatter_class=HelpFormatter,
    )
    _add_paths(parser)
    _add_text(parser)
    _add_tokenizer(parser)
    _add_instances(parser)
    _add_splits(parser)
    _add_running(parser)
    return parser.parse_args(argv)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "in and out")
    flags.add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, globs or URLs: text, .jsonl, .xml wiki dumps, .parquet, each also .gz .bz2 .zst; "
        "hf:NAME for a Hugging Face dataset",
    )
    flags.add("--output_dir", required=True, metavar="DIR", help="a folder or a URL; shards go to DIR/<max_seq_length>")
    flags.add("--tokenizer_dir", metavar="DIR", help="where the tokenizer is saved (default: <output_dir>/tokenizer)")


def _add_text(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "text")
    flags.add(
        "--layout",
        choices=LAYOUTS,
        default="auto",
        help="of text files: one sentence a line, one paragraph a line, or running text",
    )
    flags.add("--language", default="en", metavar="CODE", help="of the text, for splitting sentences")
    flags.add(
        "--text_field",
        default="text",
        metavar="NAME",
        help="the field or column with the text in JSON Lines, Parquet and datasets",
    )
    flags.add(
        "--min_document_words",
        type=int,
        default=3,
        metavar="N",
        help="drop shorter documents; a Chinese, Japanese, Thai or Khmer character counts as a word",
    )
    flags.add(
        "--near_duplicates",
        type=float,
        metavar="X",
        help="also drop documents that share this much of their words' sequences "
        "(Jaccard, such as 0.8; default: only exact duplicates go)",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    either = parser.add_argument_group("tokenizer").add_mutually_exclusive_group(required=True)
    either.add_argument("--vocab_file", metavar="FILE", help="use this vocab.txt, tokenizer.json, or folder with one")
    either.add_argument("--vocab_size", type=positive_int, metavar="N", help="train a WordPiece tokenizer of this size")
    flags = FlagGroup(parser, "tokenizer details")
    flags.add(
        "--do_lower_case",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lower-case and strip accents (default: what the tokenizer says; on when one is trained)",
    )
    flags.add("--tokenizer_sample_mb", type=positive_int, default=50, metavar="MB", help="text to train it on, at most")


def _add_instances(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "instances")
    flags.add(
        "--max_seq_length",
        type=int,
        nargs="+",
        default=[128],
        metavar="S",
        help="tokens a row; several for several outputs",
    )
    flags.add(
        "--max_predictions_per_seq",
        type=int,
        nargs="+",
        metavar="P",
        help="masked tokens a row, at most, one for each length (default: 20 for 128, 80 for 512, else 15 %% of S)",
    )
    flags.add(
        "--objective",
        choices=OBJECTIVES,
        default="nsp",
        help="next-sentence pairs, full sentences without pairs, or sentence order",
    )
    flags.add(
        "--short_seq_prob",
        type=float,
        default=0.1,
        metavar="X",
        help="share of rows that aim at a random shorter length",
    )
    flags.add(
        "--dupe_factor",
        type=int,
        default=5,
        metavar="N",
        help="copies with different pairs and masks; 0: one copy without masks, to be masked while training",
    )
    flags.add(
        "--masking_unit", choices=UNITS, default="token", help="mask single tokens, whole words, or spans of words"
    )
    flags.add("--masking_rate", type=float, default=0.15, metavar="X", help="share of tokens to predict")


def _add_splits(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "splits and shards")
    flags.add(
        "--validation_share", type=float, default=0.01, metavar="X", help="share of documents held out for validation"
    )
    flags.add("--test_share", type=float, default=0.0, metavar="X", help="share of documents held out for a test")
    flags.add("--shard_rows", type=int, default=32768, metavar="N", help="rows a shard, at most")
    flags.add(
        "--compression",
        choices=("gzip", "none"),
        default="gzip",
        help="gzip is a quarter of the size, none reads faster",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "running")
    flags.add("--seed", type=seed_number, default=42, metavar="N", help="the same seed and input give the same bytes")
    flags.add(
        "--workers",
        type=positive_int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; does not change the output",
    )
    flags.switch("--overwrite", help="replace what other settings or other input left in the output folder")
    flags.add("--executor", choices=EXECUTORS, default="processes", help="where tasks run: here, or on a Dask cluster")
    flags.add("--scheduler", metavar="ADDRESS", help="of the Dask cluster, such as tcp://host:8786")
    flags.add(
        "--work_dir",
        metavar="DIR",
        help="for what is made on the way; all workers must see it (default: <output_dir>/.work)",
    )
    flags.switch("--keep_work", help="keep the work folder when done")


def settings_from(arguments: argparse.Namespace) -> Settings:
    lengths = tuple(arguments.max_seq_length)
    predictions = arguments.max_predictions_per_seq
    if predictions is None:
        predictions = [default_predictions(length) for length in lengths]
    same_name = {field.name: getattr(arguments, field.name) for field in fields(Settings) if field.name in arguments}
    return Settings(
        max_seq_lengths=lengths,
        max_predictions=tuple(predictions),
        deflate_level=1 if arguments.compression == "gzip" else None,
        lower_case=arguments.do_lower_case,
        **same_name,
    )

"""The command line of `python -m data.prepare`, and the settings it stands for."""

import argparse
import os
from collections.abc import Sequence

from common.help import HelpFormatter, Parser, positive_int, seed_number
from data.executors import EXECUTORS
from data.instances import OBJECTIVES
from data.masking import UNITS
from data.settings import Settings, default_predictions
from data.sources import LAYOUTS


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data.prepare",
        description="Turn text into HDF5 shards that BERT pretraining reads, and a tokenizer with them.",
        formatter_class=HelpFormatter,
    )
    paths = parser.add_argument_group("in and out")
    paths.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, globs or URLs: text, .jsonl, .xml wiki dumps, .parquet, each also .gz .bz2 .zst; "
        "hf:NAME for a Hugging Face dataset",
    )
    paths.add_argument(
        "--output_dir", required=True, metavar="DIR", help="a folder or a URL; shards go to DIR/<max_seq_length>"
    )
    paths.add_argument(
        "--tokenizer_dir", metavar="DIR", help="where the tokenizer is saved (default: <output_dir>/tokenizer)"
    )

    text = parser.add_argument_group("text")
    text.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="auto",
        help="of text files: one sentence a line, one paragraph a line, or running text",
    )
    text.add_argument("--language", default="en", metavar="CODE", help="of the text, for splitting sentences")
    text.add_argument(
        "--text_field",
        default="text",
        metavar="NAME",
        help="the field or column with the text in JSON Lines, Parquet and datasets",
    )
    text.add_argument("--min_document_words", type=int, default=3, metavar="N", help="drop shorter documents")
    text.add_argument(
        "--near_duplicates",
        type=float,
        metavar="X",
        help="also drop documents that share this much of their words' sequences "
        "(Jaccard, such as 0.8; default: only exact duplicates go)",
    )

    tokenizer = parser.add_argument_group("tokenizer").add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--vocab_file", metavar="FILE", help="use this vocab.txt, tokenizer.json, or folder with one"
    )
    tokenizer.add_argument(
        "--vocab_size", type=positive_int, metavar="N", help="train a WordPiece tokenizer of this size"
    )
    training = parser.add_argument_group("tokenizer details")
    training.add_argument(
        "--do_lower_case",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lower-case and strip accents (default: what the tokenizer says; on when one is trained)",
    )
    training.add_argument(
        "--tokenizer_sample_mb", type=positive_int, default=50, metavar="MB", help="text to train it on, at most"
    )

    instances = parser.add_argument_group("instances")
    instances.add_argument(
        "--max_seq_length",
        type=int,
        nargs="+",
        default=[128],
        metavar="S",
        help="tokens a row; several for several outputs",
    )
    instances.add_argument(
        "--max_predictions_per_seq",
        type=int,
        nargs="+",
        metavar="P",
        help="masked tokens a row, at most, one for each length (default: 20 for 128, 80 for 512, else 15 %% of S)",
    )
    instances.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="nsp",
        help="next-sentence pairs, full sentences without pairs, or sentence order",
    )
    instances.add_argument(
        "--short_seq_prob",
        type=float,
        default=0.1,
        metavar="X",
        help="share of rows that aim at a random shorter length",
    )
    instances.add_argument(
        "--dupe_factor",
        type=int,
        default=5,
        metavar="N",
        help="copies with different pairs and masks; 0: one copy without masks, to be masked while training",
    )
    instances.add_argument(
        "--masking_unit", choices=UNITS, default="token", help="mask single tokens, whole words, or spans of words"
    )
    instances.add_argument("--masking_rate", type=float, default=0.15, metavar="X", help="share of tokens to predict")

    splits = parser.add_argument_group("splits and shards")
    splits.add_argument(
        "--validation_share", type=float, default=0.01, metavar="X", help="share of documents held out for validation"
    )
    splits.add_argument(
        "--test_share", type=float, default=0.0, metavar="X", help="share of documents held out for a test"
    )
    splits.add_argument("--shard_rows", type=int, default=32768, metavar="N", help="rows a shard, at most")
    splits.add_argument(
        "--compression",
        choices=("gzip", "none"),
        default="gzip",
        help="gzip is a quarter of the size, none reads faster",
    )

    running = parser.add_argument_group("running")
    running.add_argument(
        "--seed", type=seed_number, default=42, metavar="N", help="the same seed and input give the same bytes"
    )
    running.add_argument(
        "--workers",
        type=positive_int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; does not change the output",
    )
    running.add_argument(
        "--overwrite", action="store_true", help="replace what other settings or other input left in the output folder"
    )
    running.add_argument(
        "--executor", choices=EXECUTORS, default="processes", help="where tasks run: here, or on a Dask cluster"
    )
    running.add_argument("--scheduler", metavar="ADDRESS", help="of the Dask cluster, such as tcp://host:8786")
    running.add_argument(
        "--work_dir",
        metavar="DIR",
        help="for what is made on the way; all workers must see it (default: <output_dir>/.work)",
    )
    running.add_argument("--keep_work", action="store_true", help="keep the work folder when done")
    return parser.parse_args(argv)


def settings_from(arguments: argparse.Namespace) -> Settings:
    lengths = tuple(arguments.max_seq_length)
    predictions = arguments.max_predictions_per_seq
    if predictions is None:
        predictions = [default_predictions(length) for length in lengths]
    return Settings(
        max_seq_lengths=lengths,
        max_predictions=tuple(predictions),
        objective=arguments.objective,
        dupe_factor=arguments.dupe_factor,
        masking_unit=arguments.masking_unit,
        masking_rate=arguments.masking_rate,
        short_seq_prob=arguments.short_seq_prob,
        validation_share=arguments.validation_share,
        test_share=arguments.test_share,
        seed=arguments.seed,
        shard_rows=arguments.shard_rows,
        deflate_level=1 if arguments.compression == "gzip" else None,
        lower_case=arguments.do_lower_case,
        vocab_size=arguments.vocab_size,
        tokenizer_sample_mb=arguments.tokenizer_sample_mb,
        layout=arguments.layout,
        language=arguments.language,
        text_field=arguments.text_field,
        near_duplicates=arguments.near_duplicates,
        min_document_words=arguments.min_document_words,
    )

"""The command line of `python -m data.prepare`, the settings it stands for, and the folders it names."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError
from common.files import check_folder_to_write
from common.help import HelpFormatter, Parser, positive_int, seed_number
from common.stores import is_url
from data.instances.segments import OBJECTIVES
from data.masking import UNITS
from data.preparation.executors import EXECUTORS
from data.preparation.settings import Settings, default_predictions
from data.preparation.work_folder import check_work_folder
from data.text.layouts import LAYOUTS
from data.tokenizer_training import TOKENIZER_TYPES

WORK_NAME = ".work"


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for beside the settings, which determine the output."""

    settings: Settings
    input: list[str]
    output_dir: str
    tokenizer_dir: str  # or a URL
    work_dir: Path | None
    vocab_file: Path | None
    workers: int
    overwrite: bool
    executor: str
    scheduler: str | None
    keep_work: bool


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    parser = Parser(
        prog="python -m data.prepare",
        description="Turn text into HDF5 shards for BERT pretraining, and a tokenizer.",
        formatter_class=HelpFormatter,
    )
    for add_flags in (_add_input, _add_tokenizer, _add_instances, _add_running):
        add_flags(parser)
    given = vars(parser.parse_args(argv))
    given["output_dir"] = given["output_dir"].rstrip("/") or "/"
    given["tokenizer_dir"] = given["tokenizer_dir"] or f"{given['output_dir']}/tokenizer"
    given["settings"] = _settings_from(given)
    return Arguments(**{field.name: given[field.name] for field in fields(Arguments)})


def _add_input(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input and output").add_argument
    formats = (
        "text, .html .jsonl .json .csv .tsv .parquet, .xml wiki dumps, optionally .gz .bz2 .zst; .zip .tar; hf:NAME"
    )
    add("--input", nargs="+", required=True, metavar="PATH", help=f"files, folders, globs or URLs: {formats}")
    add("--output_dir", required=True, metavar="DIR", help="folder or URL; shards go to DIR/<max_seq_length>")
    add("--tokenizer_dir", metavar="DIR", help="where to save the tokenizer (default: <output_dir>/tokenizer)")
    add = parser.add_argument_group("text").add_argument
    layout = "of text files: one sentence or paragraph per line, articles with ` = Title = `, or running text"
    add("--layout", choices=LAYOUTS, default="auto", help=layout)
    add("--language", default="en", metavar="CODE", help="language of the text, for splitting sentences")
    field = "field or column with the text in JSON, CSV, TSV, Parquet and datasets"
    add("--text_field", default="text", metavar="NAME", help=field)
    words = "drop shorter documents; each Chinese, Japanese, Thai or Khmer character counts as a word"
    add("--min_document_words", type=int, default=3, metavar="N", help=words)
    near = "also drop documents with this Jaccard similarity of word sequences, such as 0.8 (default: exact duplicates)"
    add("--near_duplicates", type=float, metavar="X", help=near)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    either = parser.add_argument_group("tokenizer").add_mutually_exclusive_group(required=True)
    given = "use this vocab.txt, tokenizer.json, or folder with one"
    either.add_argument("--vocab_file", type=Path, metavar="FILE", help=given)
    either.add_argument("--vocab_size", type=positive_int, metavar="N", help="train a tokenizer of this size")
    add = parser.add_argument_group("tokenizer details").add_argument
    kind = "type to train: BERT's, byte-level as RoBERTa's and ModernBERT's, or as XLM-R's (default: wordpiece)"
    add("--tokenizer_type", choices=TOKENIZER_TYPES, help=kind)
    case = "lower-case and strip accents (default: as the tokenizer says; on if a wordpiece one is trained)"
    add("--do_lower_case", action=argparse.BooleanOptionalAction, default=None, help=case)
    amount = "maximum amount of text to train it on, evenly spread over the input"
    add("--tokenizer_sample_mb", type=positive_int, default=50, metavar="MB", help=amount)


def _add_instances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("instances").add_argument
    length = "tokens per row; several lengths give several outputs"
    add("--max_seq_length", type=int, nargs="+", default=[128], metavar="S", help=length)
    most = "maximum masked tokens per row, one for each length (default: 20 for 128, 80 for 512, else 15 %% of S)"
    add("--max_predictions_per_seq", type=int, nargs="+", metavar="P", help=most)
    objective = "next-sentence pairs, full sentences without pairs, or sentence order"
    add("--objective", choices=OBJECTIVES, default="nsp", help=objective)
    short = "share of rows with a random shorter target length"
    add("--short_seq_prob", type=float, default=0.1, metavar="X", help=short)
    copies = "copies with different pairs and masks; 0: one copy without masks, for dynamic masking"
    add("--dupe_factor", type=int, default=5, metavar="N", help=copies)
    unit = "mask single tokens, whole words, or spans of words"
    add("--masking_unit", choices=UNITS, default="token", help=unit)
    add("--masking_rate", type=float, default=0.15, metavar="X", help="share of tokens to predict")
    add = parser.add_argument_group("splits and shards").add_argument
    held_out = "share of documents held out for"
    share = f"{held_out} validation (default: 0.01, or what leaves 200 rows, at most 0.1)"
    add("--validation_share", type=float, metavar="X", help=share)
    add("--test_share", type=float, default=0.0, metavar="X", help=f"{held_out} testing")
    add("--shard_rows", type=int, default=32768, metavar="N", help="maximum rows per shard")
    gzip = "gzip takes a quarter of the space, none reads faster"
    add("--compression", choices=("gzip", "none"), default="gzip", help=gzip)


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--seed", type=seed_number, default=42, metavar="N", help="the same seed and input give the same bytes")
    workers = "number of processes; does not change the output"
    add("--workers", type=positive_int, default=os.cpu_count() or 1, metavar="N", help=workers)
    add("--overwrite", action="store_true", help="replace output of other settings or other input")
    add("--executor", choices=EXECUTORS, default="processes", help="run tasks on this machine or a Dask cluster")
    add("--scheduler", metavar="ADDRESS", help="of the Dask cluster, such as tcp://host:8786")
    work = "folder for intermediate files, visible to all workers (default: <output_dir>/.work)"
    add("--work_dir", type=Path, metavar="DIR", help=work)
    add("--keep_work", action="store_true", help="keep the work folder when done")


def _settings_from(given: Mapping[str, Any]) -> Settings:
    lengths, predictions = given["max_seq_length"], given["max_predictions_per_seq"]
    if predictions is None:
        predictions = [default_predictions(length) for length in lengths]
    return Settings(
        max_seq_lengths=tuple(lengths),
        max_predictions=tuple(predictions),
        deflate_level=1 if given["compression"] == "gzip" else None,
        lower_case=given["do_lower_case"],
        **{field.name: given[field.name] for field in fields(Settings) if field.name in given},
    )


def check_folders(output_dir: str, tokenizer_dir: str, work_dir: Path | None) -> Path:
    """Return the work folder. Raise UserError if a local folder cannot be written to, before hours of work."""
    if work_dir is None and is_url(output_dir):
        raise UserError(f"--output_dir {output_dir} is a URL; give a local --work_dir for intermediate files")
    work = work_dir or Path(output_dir) / WORK_NAME
    problems = Problems()
    for flag, folder in (("--output_dir", output_dir), ("--tokenizer_dir", tokenizer_dir), ("--work_dir", str(work))):
        if not is_url(folder):
            check_folder_to_write(Path(folder), flag, problems)
    problems.raise_if_any()
    check_work_folder(work)
    return work


def folders_written(arguments: Arguments, work: Path) -> list[str]:
    """Return the folders that this command writes, which are not text to read even if they are inside the input."""
    output = arguments.output_dir
    folders = [str(work), arguments.tokenizer_dir]
    folders += [f"{output}/{length}" for length in arguments.settings.max_seq_lengths]
    inputs = [Path(given).absolute() for given in arguments.input if not is_url(given)]
    if not is_url(output) and any(given in Path(output).absolute().parents for given in inputs):
        folders.append(output)
    return folders

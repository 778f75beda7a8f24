"""From text to shards: `python -m data.prepare --input TEXT --output_dir data/hdf5 --vocab_size 8192 …`."""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import UserError, run_command
from common.files import write_atomically
from data.instances import OBJECTIVES
from data.masking import UNITS
from data.pipeline import Pipeline, require_documents
from data.schema import FORMAT_VERSION, MANIFEST_NAME
from data.settings import Settings, default_predictions
from data.sources import LAYOUTS, Source, describe_sources, find_sources
from data.stages import Job
from data.tokenizer import BertTokenizer, load_tokenizer
from data.writer import remove_temporaries

WORK_NAME = ".work"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description="Turn text into HDF5 shards that BERT pretraining reads, and a tokenizer with them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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
    paths.add_argument("--output_dir", required=True, metavar="DIR", help="shards go to DIR/<max_seq_length>")
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
    tokenizer.add_argument("--vocab_size", type=int, metavar="N", help="train a WordPiece tokenizer of this size")
    training = parser.add_argument_group("tokenizer details")
    training.add_argument(
        "--do_lower_case",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lower-case and strip accents (default: what the tokenizer says; on when one is trained)",
    )
    training.add_argument(
        "--tokenizer_sample_mb", type=int, default=50, metavar="MB", help="text to train it on, at most"
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
        "--seed", type=int, default=42, metavar="N", help="the same seed and input give the same bytes"
    )
    running.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; does not change the output"
    )
    running.add_argument(
        "--overwrite", action="store_true", help="replace what other settings or other input left in the output folder"
    )
    running.add_argument("--keep_work", action="store_true", help="keep the work folder when done")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    settings = settings_from(arguments)
    settings.check()
    output = Path(arguments.output_dir)
    tokenizer = None
    if arguments.vocab_file is not None:
        tokenizer = load_tokenizer(Path(arguments.vocab_file), lower_case=arguments.do_lower_case)
    sources = find_sources(arguments.input, settings.layout)
    fingerprint = settings.fingerprint(describe_sources(sources), tokenizer.digest if tokenizer else None)
    if _is_done(output, fingerprint, settings, arguments.overwrite):
        console.say(
            f"{output}: already prepared from this input with these settings; nothing to do (--overwrite does it again)"
        )
        return 0
    work = _open_work(output, fingerprint, settings, arguments.overwrite)
    tokenizer_dir = Path(arguments.tokenizer_dir) if arguments.tokenizer_dir else output / "tokenizer"
    job = Job(settings, str(work), str(output), str(tokenizer_dir))
    started = time.perf_counter()
    with _executor(arguments.workers) as executor:
        summary = prepare(Pipeline(job, executor, arguments.workers), sources, tokenizer, arguments.input)
    for length, shards in summary["shards"].items():
        _write_manifest(output / str(length), shards, settings, fingerprint)
    if not arguments.keep_work:
        shutil.rmtree(work)
    _say_summary(summary, output, tokenizer_dir, time.perf_counter() - started)
    return 0


def prepare(
    pipeline: Pipeline, sources: Sequence[Source], tokenizer: BertTokenizer | None, inputs: Sequence[str]
) -> dict[str, Any]:
    """All stages in order; returns what was counted on the way."""
    read = pipeline.ingest(sources)
    pieces = require_documents(read, inputs)
    duplicates = pipeline.deduplicate(pieces)
    tokenizer = pipeline.tokenizer(pieces, tokenizer)
    encoded = dict(zip(pieces, pipeline.encode(pieces), strict=True))
    made = pipeline.cut(encoded)
    shards = pipeline.write(made)
    counts: dict[str, int] = {}
    for result in read:
        for name, count in result["counts"].items():
            counts[name] = counts.get(name, 0) + count
    return {"counts": counts, "duplicates": duplicates, "encoded": list(encoded.values()), "shards": shards}


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


def _is_done(output: Path, fingerprint: str, settings: Settings, overwrite: bool) -> bool:
    """Whether this very preparation is complete. Another one in the same place is only replaced when told to."""
    if overwrite:
        return False
    manifests = [output / str(length) / MANIFEST_NAME for length in settings.max_seq_lengths]
    found = [json.loads(path.read_text()).get("fingerprint") if path.is_file() else None for path in manifests]
    for path, other in zip(manifests, found, strict=True):
        if other is not None and other != fingerprint:
            raise UserError(
                f"{path.parent}: holds shards made from other input or with other settings; "
                "give another --output_dir, or pass --overwrite to replace them"
            )
    return all(other is not None for other in found)


def _open_work(output: Path, fingerprint: str, settings: Settings, overwrite: bool) -> Path:
    """The work folder: the one an interrupted run left, if it was the same preparation, or a new one."""
    work = output / WORK_NAME
    marker = work / "fingerprint"
    if marker.is_file() and marker.read_text() == fingerprint and not overwrite:
        console.say(f"{work}: going on where an earlier run stopped")
    else:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_atomically(marker, fingerprint)
        for length in settings.max_seq_lengths:
            _empty_folder(output / str(length))
    for length in settings.max_seq_lengths:
        (output / str(length)).mkdir(parents=True, exist_ok=True)
        remove_temporaries(output / str(length))
    return work


def _empty_folder(folder: Path) -> None:
    for path in [*folder.glob("*.hdf5"), folder / MANIFEST_NAME]:
        path.unlink(missing_ok=True)


@contextmanager
def _executor(workers: int) -> Iterator[Executor | None]:
    if workers <= 1:
        yield None
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def _write_manifest(folder: Path, shards: Sequence[dict[str, Any]], settings: Settings, fingerprint: str) -> None:
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "settings": asdict(settings),
        "files": [{key: shard[key] for key in ("name", "split", "rows", "bytes", "sha256")} for shard in shards],
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


def _say_summary(summary: dict[str, Any], output: Path, tokenizer_dir: Path, seconds: float) -> None:
    counts = summary["counts"]
    console.say(f"read {counts.get('documents', 0):,} documents, dropped {summary['duplicates']:,} duplicates")
    for length, shards in summary["shards"].items():
        for split in ("training", "validation", "test"):
            mine = [shard for shard in shards if shard["split"] == split]
            if mine:
                rows, tokens = sum(shard["rows"] for shard in mine), sum(shard["tokens"] for shard in mine)
                fill = tokens / rows / length
                console.say(
                    f"{output / str(length)}: {split}: {rows:,} rows in {len(mine)} shards, filled to {fill:.0%}"
                )
    console.say(f"{tokenizer_dir}: the tokenizer")
    console.say(f"done in {seconds:.1f} s")


if __name__ == "__main__":
    run_command(main)

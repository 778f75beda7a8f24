"""From text to shards: `python -m data.prepare --input TEXT --output_dir data/hdf5 --vocab_size 8192 …`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.dirfs import DirFileSystem

from common.console import console
from common.errors import run_command
from common.files import write_atomically
from common.stores import is_url
from common.words import counted
from data.preparation import output as output_
from data.preparation import work_folder
from data.preparation.arguments import check_folders, folders_written, parse_arguments
from data.preparation.executors import open_executor
from data.preparation.pipeline import SAMPLE_BYTES, Pipeline, Summary, describe_damaged
from data.preparation.work_folder import Job
from data.shards.schema import SPLITS
from data.text.documents import check_text_fields
from data.text.sources import describe_formats, describe_sources, find_sources
from data.tokenizer import BertTokenizer, load_tokenizer

_COUNTED = ("files", "documents", "duplicates", "sentences", "tokens", "lines", "records", "rows", "pages")
_SHARDS_FETCHED = 4  # of each split, for the report on output that is not a local folder


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    settings = arguments.settings
    settings.check()
    work = check_folders(arguments.output_dir, arguments.tokenizer_dir, arguments.work_dir)
    root = arguments.output_dir
    output = output_.open_output(root)
    tokenizer = None
    if arguments.vocab_file is not None:
        tokenizer = load_tokenizer(arguments.vocab_file, lower_case=settings.lower_case)
    sources = find_sources(arguments.input, settings.layout, folders_written(arguments, work))
    fingerprint = settings.fingerprint(describe_sources(sources), tokenizer.digest if tokenizer else None)
    if not arguments.overwrite:
        if output_.check_complete(output, root, fingerprint, settings):
            console.say(f"{root}: already prepared from this input with these settings; nothing to do")
            work_folder.close_work(work, fingerprint, arguments.keep_work)
            return 0
        if not work_folder.is_begun(work, fingerprint):
            output_.refuse_to_replace(output, root, settings)
    check_text_fields(sources, settings.text_field)
    job = Job(settings, str(work), root, str(work / "tokenizer"))
    started = time.perf_counter()
    with work_folder.using_work(work):
        is_resumed = work_folder.open_work(work, fingerprint, overwrite=arguments.overwrite)
        output_.clear_output(output, settings, is_resumed=is_resumed)
        with open_executor(arguments.executor, arguments.workers, arguments.scheduler) as (executor, workers):
            console.say(describe_formats(sources))
            summary = Pipeline(job, executor, workers).run(sources, tokenizer, arguments.input)
    tokenizer_output = output_.open_output(arguments.tokenizer_dir)
    for path in sorted(Path(job.tokenizer).iterdir()):
        output_.write_file(tokenizer_output, path.name, path.read_bytes())
    used = tokenizer or load_tokenizer(Path(job.tokenizer))
    _report(summary, output, root, used, work, time.perf_counter() - started)
    for length, shards in summary.shards.items():  # last: a manifest marks its shards as complete
        output_.write_manifest(output, length, shards, summary.settings, fingerprint)
    work_folder.close_work(work, fingerprint, arguments.keep_work)
    return 0


def _report(
    summary: Summary, output: DirFileSystem, root: str, tokenizer: BertTokenizer, work: Path, seconds: float
) -> None:
    from data.inspect import inspect_folder  # here, because no worker needs them
    from data.shards.report import Preparation, report_files

    shown = {name: count for name, count in summary.counts.items() if count and name != SAMPLE_BYTES}
    console.say(", ".join(_count_in_words(name, count) for name, count in shown.items()))
    counts = summary.counts | {"seconds": round(seconds, 1)}
    for length, shards in summary.shards.items():
        folder = f"{root}/{length}"
        splits = {}
        for split in SPLITS:
            mine = [shard for shard in shards if shard["split"] == split]
            rows, tokens = (sum(shard[name] for shard in mine) for name in ("rows", "tokens"))
            copies, has_trained = summary.settings.copies(split), summary.settings.vocab_size is not None
            splits[split] = Preparation(folder, len(mine), rows, copies, has_trained)
            if mine:
                size = f"{counted(rows, 'row')} in {counted(len(mine), 'file')}"
                console.say(f"{folder}: {split}: {size}, filled to {tokens / rows / length:.0%}")
        readable = _fetch_some(output, length, shards, work) if is_url(folder) else Path(folder)
        found = inspect_folder(readable, tokenizer, preparation=splits)
        for name, content in report_files(found, counts, summary.files).items():
            output_.write_file(output, f"{length}/{name}", content)
        for description in found:
            for warning in description.warnings:
                console.warn(f"{folder}: {description.split}: {warning}")
        console.say(f"{folder}/report.md: describes the shards")
    if summary.damaged:
        console.warn(f"of these files only what could be read was used; {describe_damaged(summary.damaged)}")
    console.say(f"done in {seconds:.1f} s")


def _count_in_words(name: str, count: int) -> str:
    """`files_of_json`, 1 → `1 file read as json`. The first word in the plural is what is counted."""
    words = name.replace("files_of_", "files_read_as_").split("_")
    if count == 1:
        index = next((i for i, word in enumerate(words) if word in _COUNTED), None)
        words = [word.removesuffix("s") if i == index else word for i, word in enumerate(words)]
    return f"{count:,} {' '.join(words)}"


def _fetch_some(output: DirFileSystem, length: int, shards: Sequence[dict[str, Any]], work: Path) -> Path:
    """Copy a few shards of each split, spread over it, to a local folder."""
    folder = work / "report" / str(length)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        names = [shard["name"] for shard in shards if shard["split"] == split]
        for name in names[:: max(1, -(-len(names) // _SHARDS_FETCHED))]:
            write_atomically(folder / name, output.cat_file(f"{length}/{name}"))
    return folder


if __name__ == "__main__":
    run_command(main)

"""From text to shards: `python -m data.prepare --input TEXT --output_dir data/hdf5 --vocab_size 8192 …`."""

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import Problems, UserError, run_command
from common.files import check_folder_to_write, write_atomically
from common.words import counted
from data.preparation.arguments import parse_arguments, settings_from
from data.preparation.executors import open_executor
from data.preparation.output import Storage
from data.preparation.pipeline import Pipeline, describe_broken, require_documents
from data.preparation.settings import Settings
from data.preparation.tasks import Job, forget_words
from data.preparation.work_folder import DONE, WORK_FORMAT
from data.shards.schema import FORMAT_VERSION, MANIFEST_NAME, SPLITS, SUFFIXES
from data.text.compression import optional_import
from data.text.documents import BROKEN
from data.text.sources import Source, count_formats, describe_sources, find_sources, is_url
from data.tokenizer import BertTokenizer, load_tokenizer

WORK_NAME = ".work"
MARKER = "fingerprint"
_SHARDS_FETCHED = 4  # of a split, for the report on output that is no local folder


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    settings = settings_from(arguments)
    settings.check()
    output = Storage(arguments.output_dir)
    work = _work_path(arguments.work_dir, output)
    _check_places(arguments, work)
    tokenizer = None
    if arguments.vocab_file is not None:
        tokenizer = load_tokenizer(Path(arguments.vocab_file), lower_case=arguments.do_lower_case)
    if settings.near_duplicates is not None:
        optional_import("datasketch", "--near_duplicates")  # before anything old is removed
    sources = find_sources(arguments.input, settings.layout, _own_places(arguments, work, settings))
    fingerprint = settings.fingerprint(describe_sources(sources), tokenizer.digest if tokenizer else None)
    if not arguments.overwrite:
        if _is_done(output, fingerprint, settings):
            console.say(f"{output.root}: already prepared from this input with these settings; nothing to do")
            _close_work(work, fingerprint, arguments.keep_work)
            return 0
        if not _is_begun(work, fingerprint):
            _refuse_to_replace(output, settings)
    job = Job(settings, str(work), output.root, str(work / "tokenizer"))
    started = time.perf_counter()
    with _left_as_found(work), _told_when_interrupted():
        _open_work(work, output, fingerprint, settings, arguments.overwrite)
        with open_executor(arguments.executor, arguments.workers, arguments.scheduler) as (executor, workers):
            found = counted(len({source.path for source in sources}), "file")
            console.say(f"{found}, read as {_described(count_formats(sources))}")
            summary = prepare(Pipeline(job, executor, workers), sources, tokenizer, arguments.input)
    _save_tokenizer(Path(job.tokenizer), Storage(arguments.tokenizer_dir or f"{output.root}/tokenizer"))
    _report(summary, output, load_tokenizer(Path(job.tokenizer)), work, time.perf_counter() - started)
    for length, shards in summary["shards"].items():
        _write_manifest(output, length, shards, settings, fingerprint)  # last: from now on there is nothing to do
    _close_work(work, fingerprint, arguments.keep_work)
    return 0


def prepare(
    pipeline: Pipeline, sources: Sequence[Source], tokenizer: BertTokenizer | None, inputs: Sequence[str]
) -> dict[str, Any]:
    """All stages in order; returns the shards by length and what was counted on the way."""
    read = pipeline.ingest(sources)
    pieces = require_documents(read, inputs)
    dropped = pipeline.deduplicate(pieces, [whole for result in read for whole in result["wholes"]])
    pipeline.tokenizer(pieces, tokenizer)
    joined = {piece: part for result in read for piece, part in result["joined"].items()}
    encoded = dict(zip(pieces, pipeline.encode(pieces, joined), strict=True))
    made = pipeline.cut(encoded)
    counts = _counted(sources, read, dropped, list(encoded.values()))
    _check_splits(pipeline.job.settings, {key: sum(part[3] for part in parts) for key, parts in made.items()}, counts)
    shards = pipeline.write(made)
    forget_words()
    broken = sorted({path for result in read for path in result["broken"]})
    return {"counts": counts, "shards": shards, "broken": broken}


def _check_splits(settings: Settings, rows: dict[tuple[str, int], int], counts: dict[str, int]) -> None:
    """Refuse a preparation without a row to train on, before a shard is written; tell an empty split that was meant."""
    for length in settings.max_seq_lengths:
        if not rows.get(("training", length)):
            raise UserError(
                f"--max_seq_length {length}: not one row to train on came out of {counts['documents']:,} documents, "
                f"{counts['training_documents']:,} of them for training; give more text, or a smaller "
                f"--validation_share, --test_share or --min_document_words"
            )
    for split, share in (("validation", settings.validation_share), ("test", settings.test_share)):
        if share > 0 and not counts[f"{split}_documents"]:
            console.warn(
                f"no document is left for {split}: --{split}_share {share:g} chose none of {counts['documents']:,}, "
                f"and a document goes whole to one split; give more documents, or a larger share"
            )


def _described(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} ({count:,})" for kind, count in counts.items())


def _counted(
    sources: Sequence[Source],
    read: Sequence[dict[str, Any]],
    dropped: dict[str, int],
    encoded: Sequence[dict[str, Any]],
) -> dict[str, int]:
    """Everything that was counted, under readable names."""
    counts: Counter[str] = Counter({f"files_of_{kind}": count for kind, count in count_formats(sources).items()})
    for result in read:
        counts.update(result["counts"])
    counts[BROKEN] = len({path for result in read for path in result["broken"]})  # several tasks may read one
    counts.update(dropped)
    for result in encoded:
        counts["tokens"] += sum(split["tokens"] for split in result["splits"].values())
        counts["unknown_tokens"] += result["unknown"]
        for name, split in result["splits"].items():
            counts[f"{name}_documents"] += split["documents"]
    return dict(counts)


def _is_done(output: Storage, fingerprint: str, settings: Settings) -> bool:
    """Whether this very preparation is complete. Another one in the same place is only replaced when told to."""
    done = []
    for length in settings.max_seq_lengths:
        found, sizes = _manifest_in(output, f"{length}/{MANIFEST_NAME}")
        if found is not None and found != fingerprint:
            raise UserError(
                f"{output.root}/{length}: holds shards made from other input or with other settings; expected none, or "
                f"those of this very command; give another --output_dir, or pass --overwrite to replace them"
            )
        there = {name: size for name, size in output.sizes(str(length)).items() if name.endswith(SUFFIXES)}
        if found is not None and sizes != there:
            changed = sorted(name for name, _ in sizes.items() ^ there.items())
            console.warn(f"{output.root}/{length}: {changed[0]} is not as {MANIFEST_NAME} lists it; preparing anew")
        done.append(found is not None and sizes == there)
    return all(done)


def _refuse_to_replace(output: Storage, settings: Settings) -> None:
    """Shards that no manifest lists may be somebody's only copy."""
    problems = Problems()
    for length in settings.max_seq_lengths:
        _, listed = _manifest_in(output, f"{length}/{MANIFEST_NAME}")  # of this very preparation, if there is one
        shards = [name for name in output.sizes(str(length)) if name.endswith(SUFFIXES) and name not in listed]
        if shards:
            problems.add(
                f"{output.root}/{length}: holds {len(shards)} HDF5 files that this preparation did not make, such as "
                f"{shards[0]}; expected none; give another --output_dir, or pass --overwrite to replace them"
            )
    problems.raise_if_any()


def _manifest_in(output: Storage, name: str) -> tuple[str | None, dict[str, int]]:
    """Of which preparation the shards beside a manifest are, and their sizes; None where there is no manifest."""
    if not output.exists(name):
        return None, {}
    try:
        manifest = json.loads(output.read_text(name))
        return str(manifest["fingerprint"]), {file["name"]: file["bytes"] for file in manifest["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{output.root}/{name}: is no manifest of shards ({error}); expected one that this command wrote; give "
            f"another --output_dir, or pass --overwrite to prepare them anew"
        ) from error


def _check_places(arguments: argparse.Namespace, work: Path) -> None:
    """Every local folder that will be written to, before hours of work."""
    problems = Problems()
    for flag in ("output_dir", "tokenizer_dir", "work_dir"):
        given = getattr(arguments, flag)
        if given is not None and not is_url(given):
            check_folder_to_write(Path(given), f"--{flag}", problems)
    problems.raise_if_any()
    if work.is_dir() and not (work / MARKER).is_file() and not all(map(_is_of_marker, work.iterdir())):
        raise UserError(
            f"{work}: is no work folder of this command and not empty; expected a new or empty folder, or one that "
            f"this command left; give another --work_dir"
        )


def _own_places(arguments: argparse.Namespace, work: Path, settings: Settings) -> list[str]:
    """What this command writes, which is no text to read even where it lies below the input."""
    output = arguments.output_dir.rstrip("/")
    places = [str(work), arguments.tokenizer_dir or f"{output}/tokenizer"]
    places += [f"{output}/{length}" for length in settings.max_seq_lengths]
    inputs = [Path(given).absolute() for given in arguments.input if not is_url(given)]
    if not is_url(output) and any(given in Path(output).absolute().parents for given in inputs):
        places.append(output)
    return places


@contextmanager
def _told_when_interrupted() -> Iterator[None]:
    """Tasks under way come to their end, those that wait are left for the next start."""
    try:
        yield
    except KeyboardInterrupt:
        console.warn("the same command goes on where it was")
        raise


@contextmanager
def _left_as_found(work: Path) -> Iterator[None]:
    """Take away a new work folder, and the empty folders made for it, when the input turns out to be a mistake."""
    is_new = not work.exists()
    made = [folder for folder in (work, *work.absolute().parents) if not folder.exists()]
    try:
        yield
    except UserError:
        if is_new:
            with suppress(OSError):
                _remove_work(work)
            for folder in made[1:]:
                with suppress(OSError):  # not empty: somebody else's by now
                    folder.rmdir()
        raise


def _work_path(given: str | None, output: Storage) -> Path:
    if given is None and not output.is_local:
        raise UserError(f"--output_dir {output.root} is a URL; give a local --work_dir for what is made on the way")
    return Path(given) if given is not None else output.path(WORK_NAME)


def _is_continued(work: Path, fingerprint: str) -> bool:
    """Whether an interrupted run of this very preparation left its work folder, in a form that can be gone on with."""
    marker = work / MARKER
    return marker.is_file() and marker.read_text() == _marker_text(fingerprint)


def _is_begun(work: Path, fingerprint: str) -> bool:
    """Whether the work folder is of this very preparation, be it of another version of this program."""
    marker = work / MARKER
    return marker.is_file() and marker.read_text().partition(" ")[0] == fingerprint


def _marker_text(fingerprint: str) -> str:
    return f"{fingerprint} {WORK_FORMAT}"


def _open_work(work: Path, output: Storage, fingerprint: str, settings: Settings, overwrite: bool) -> None:
    """The work folder: the one an interrupted run left, if it was the same preparation, or a new one."""
    is_continued = _is_continued(work, fingerprint) and not overwrite
    if is_continued:
        console.say(f"{work}: going on where an earlier run stopped")
    else:
        if _is_begun(work, fingerprint) and not overwrite:
            console.say(f"{work}: was begun by another version of this program; beginning anew")
        if work.exists():
            _remove_work(work)
        work.mkdir(parents=True)
        write_atomically(work / MARKER, _marker_text(fingerprint))
    for length in settings.max_seq_lengths:
        for name in output.sizes(str(length)):
            if name.endswith(".tmp") or (not is_continued and name.endswith((*SUFFIXES, MANIFEST_NAME))):
                output.remove(f"{length}/{name}")


def _close_work(work: Path, fingerprint: str, keep: bool) -> None:
    """Take the work folder away, also one that a run killed at its very end has left."""
    if _is_continued(work, fingerprint) and not keep:
        _remove_work(work)


def _remove_work(work: Path) -> None:
    """Killed on the way, it is still a work folder, and a sound one.

    So what says which tasks are done goes before what they made, and the marker last.
    """
    for path in sorted(work.iterdir(), key=lambda path: (_is_of_marker(path), path.name != DONE)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    work.rmdir()


def _is_of_marker(path: Path) -> bool:
    """The marker, or what a kill left that came while it was written."""
    return path.name == MARKER or path.name.startswith(f".{MARKER}.")


def _save_tokenizer(made: Path, final: Storage) -> None:
    for path in sorted(made.iterdir()):
        final.write(path.name, path.read_bytes())


def _write_manifest(
    output: Storage, length: int, shards: Sequence[dict[str, Any]], settings: Settings, fingerprint: str
) -> None:
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "settings": asdict(settings),
        "files": [{key: shard[key] for key in ("name", "split", "rows", "bytes", "sha256")} for shard in shards],
    }
    output.write(f"{length}/{MANIFEST_NAME}", json.dumps(manifest, indent=2) + "\n")


def _report(summary: dict[str, Any], output: Storage, tokenizer: BertTokenizer, work: Path, seconds: float) -> None:
    counts = summary["counts"]
    console.say(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count))
    for length, shards in summary["shards"].items():
        for split in SPLITS:
            mine = [shard for shard in shards if shard["split"] == split]
            if mine:
                rows, tokens = sum(shard["rows"] for shard in mine), sum(shard["tokens"] for shard in mine)
                fill = tokens / rows / length
                size = f"{counted(rows, 'row')} in {counted(len(mine), 'file')}"
                console.say(f"{output.root}/{length}: {split}: {size}, filled to {fill:.0%}")
        _write_report(output, length, shards, tokenizer, work, counts | {"seconds": round(seconds, 1)})
    if summary["broken"]:
        console.warn(f"of these files only what could be read was used; {describe_broken(summary['broken'])}")
    console.say(f"done in {seconds:.1f} s")


def _write_report(
    output: Storage,
    length: int,
    shards: Sequence[dict[str, Any]],
    tokenizer: BertTokenizer,
    work: Path,
    counts: dict[str, Any],
) -> None:
    # Imported here: torch and matplotlib are slow to load and no worker needs them.
    from data.inspect import inspect_folder
    from data.shards.report import SplitTotals, report_files

    folder = f"{output.root}/{length}"
    if output.is_local:
        found = inspect_folder(output.path(str(length)), tokenizer)
    else:
        totals = {}
        for split in SPLITS:
            mine = [shard for shard in shards if shard["split"] == split]
            totals[split] = SplitTotals(folder, len(mine), sum(shard["rows"] for shard in mine))
        found = inspect_folder(_fetch_some(output, length, shards, work), tokenizer, totals=totals)
    for name, content in report_files(found, counts).items():
        output.write(f"{length}/{name}", content)
    for description in found:
        for warning in description.warnings:
            console.warn(f"{folder}: {description.split}: {warning}")
    console.say(f"{folder}/report.md: what is in it")


def _fetch_some(output: Storage, length: int, shards: Sequence[dict[str, Any]], work: Path) -> Path:
    """A few shards of each split, spread over it, where a report can read them."""
    folder = work / "report" / str(length)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        names = [shard["name"] for shard in shards if shard["split"] == split]
        step = max(1, -(-len(names) // _SHARDS_FETCHED))
        for name in names[::step]:
            write_atomically(folder / name, output.read_bytes(f"{length}/{name}"))
    return folder


if __name__ == "__main__":
    run_command(main)

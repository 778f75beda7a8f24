"""Runs the stages of a preparation in order, each task once, on any executor.

extracting     archives → files in the work folder
reading        sources → pieces of clean text and a hash for every document; streams are unpacked into parts first
deduplication  all hashes → which documents are kept
encoding       a piece → token ids, by split
cutting        a piece → instances, by split, length and copy
writing        a range of rows → a shard
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.console import console
from common.errors import UserError
from data.preparation.duplicates import SignatureIndex, drop_repeated
from data.preparation.output import file_sizes, open_output
from data.preparation.plan import (
    InstanceSet,
    ShardTask,
    check_splits,
    choose_donors,
    donor_shift,
    plan_shards,
    with_validation_share,
)
from data.preparation.reading import (
    InputFiles,
    count_files,
    extract_archive,
    read_sources,
    sign_documents,
    unpack_stream,
)
from data.preparation.settings import Settings
from data.preparation.tasks import cut, encode, release_encoder, write
from data.preparation.work_folder import Job
from data.shards.schema import SPLITS
from data.text import sources as sources_
from data.text.files import DAMAGED
from data.text.sources import Source, count_formats, pack_sources
from data.tokenizer import BertTokenizer
from data.tokenizer_training import DEFAULT_TYPE, TextSample, train_tokenizer

SAMPLE_BYTES = "tokenizer_sample_bytes"  # of the text that the tokenizer was trained on
_MAX_NAMED_FILES = 5  # in a message
_TASKS_AHEAD = 4  # submitted per worker: enough to keep it busy, few enough to stay small

Task = tuple[str, tuple[Any, ...]]  # name, arguments after the job


class Summary(NamedTuple):
    counts: dict[str, int]
    shards: dict[int, list[dict[str, Any]]]  # by length, as the manifest lists them
    damaged: list[str]  # files
    files: list[dict[str, str]]  # what was read, as what, with a sample
    settings: Settings  # with the share of validation that was chosen


class Pipeline:
    """One preparation in progress. `executor` None runs the tasks in this process, one after the other."""

    def __init__(self, job: Job, executor: Executor | None, workers: int) -> None:
        self.job = job
        self.folder = job.folder
        self.executor = executor
        self.workers = workers
        self.files = InputFiles()

    def run(self, sources: Sequence[Source], tokenizer: BertTokenizer | None, inputs: Sequence[str]) -> Summary:
        """Run all stages. `tokenizer` None trains one; `inputs` are the words of --input, for messages."""
        read = self.read(sources)
        damaged = sorted({self.files.name(path) for result in read for path in result["damaged"]})
        pieces = [name for result in read for name, _, _ in result["pieces"]]
        if not pieces:
            hint = f" ({describe_damaged(damaged)})" if damaged else ""
            encodings = self.files.describe_encodings()
            raise UserError(
                f"--input {' '.join(inputs)}: no document of usable text was found{hint}; "
                + (encodings or "give files with text in UTF-8")
            )
        if self.files.describe_encodings():
            console.warn(self.files.describe_encodings())
        dropped = self.deduplicate(read)
        self.job = self.job._replace(settings=with_validation_share(self.job.settings, self.folder, pieces))
        sample_bytes = self.save_tokenizer(pieces, tokenizer)
        encoded = self.run_stage("encoding", encode, [(piece, (piece,)) for piece in pieces], "piece")
        made = self.cut(dict(zip(pieces, encoded, strict=True)))
        counts = _total_counts(self.files.sources, read, dropped, encoded)
        counts[SAMPLE_BYTES] = sample_bytes
        counts[DAMAGED] = len(damaged)  # several tasks may have read parts of one file
        rows = {key: sum(part[3] for part in parts) for key, parts in made.items()}
        check_splits(self.job.settings, rows, counts)
        shards = self.write(made)
        release_encoder()
        return Summary(dict(counts), shards, damaged, self.files.describe(), self.job.settings)

    def run_stage(self, stage: str, function: Callable[..., Any], tasks: Sequence[Task], unit: str) -> list[Any]:
        """Return the results of all tasks in order. Tasks that an earlier run finished are not run again."""
        results: list[Any] = [self.folder.result(stage, name) for name, _ in tasks]
        missing = [i for i, result in enumerate(results) if result is None]
        done = len(tasks) - len(missing)
        with console.progress(total=len(tasks), initial=done, desc=stage, unit=unit, in_lines=True) as bar:
            for i, result in self._completed(stage, function, tasks, missing):
                results[i] = result
                bar.update()
        return results

    def _completed(
        self, stage: str, function: Callable[..., Any], tasks: Sequence[Task], missing: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        if self.executor is None:
            for i in missing:
                yield i, run_task(function, self.job, stage, *tasks[i])
            return
        waiting = iter(missing)
        running: dict[Future[Any], int] = {}
        try:
            while True:
                for i in islice(waiting, self.workers * _TASKS_AHEAD - len(running)):
                    running[self.executor.submit(run_task, function, self.job, stage, *tasks[i])] = i
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()

    def read(self, sources: Sequence[Source]) -> list[dict[str, Any]]:
        """Return the results of extracting, unpacking and reading: pieces, counts and damaged files."""
        archives = [source for source in sources if source.format == "archive"]
        extracted = self.run_stage("extracting", extract_archive, _numbered(enumerate(archives)), "archive")
        settings = self.job.settings
        self.files.add(sources, dict(zip(archives, extracted, strict=True)), settings.layout, settings.text_field)
        sources = self._cut_named(self.files.sources)
        streams = [source for source in sources if source.is_stream]
        ranges = ((number, source, sources_.RANGE_BYTES) for number, source in enumerate(streams))
        unpacked = self.run_stage("unpacking", unpack_stream, _numbered(ranges), "file")
        parts_of = dict(zip(streams, unpacked, strict=True))
        parts: list[Source] = []
        for source in sources:
            found = parts_of.get(source)
            parts += [source] if found is None else [Source(path, source.unpacked_format) for path in found["parts"]]
        read = self.run_stage("reading", read_sources, _numbered(enumerate(pack_sources(parts))), "part")
        self.files.add_samples([*unpacked, *read], {source: found["parts"] for source, found in parts_of.items()})
        return [result | {"pieces": []} for result in [*extracted, *unpacked]] + read

    def _cut_named(self, sources: Sequence[Source]) -> list[Source]:
        """Replace a dataset by name with its files, each of which is a stream."""
        named = [source for source in sources if source.is_named]
        found = self.run_stage("listing", count_files, _numbered([(source,) for source in named]), "dataset")
        counts = dict(zip(named, found, strict=True))
        return [
            source._replace(start=number, stop=number + 1) if source in counts else source
            for source in sources
            for number in range(counts.get(source, 1))
        ]

    def deduplicate(self, read: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Save the key of every document of a piece: its hash, or `DROPPED`. Return how many documents were dropped.

        The first of equal documents is kept and, if near duplicates are to be dropped, the first of similar ones.
        """
        done = self.folder.result("deduplicate", "all")
        if done is not None:
            return done
        read = [result for result in read if result["pieces"]]
        hashes = [self.folder.load_array("hashes", result["task"]) for result in read]
        dropped = {"duplicates": drop_repeated(hashes), "near_duplicates": 0}
        pieces = [
            (name, found[first : first + count].copy())
            for result, found in zip(read, hashes, strict=True)
            for name, first, count in result["pieces"]
        ]
        threshold = self.job.settings.near_duplicates
        if threshold is not None:
            self.run_stage("signing", sign_documents, [(name, (name,)) for name, _ in pieces], "piece")
            index = SignatureIndex(threshold)
            for name, keys in console.progress(pieces, desc="comparing", unit="piece", in_lines=True):
                dropped["near_duplicates"] += index.drop_similar(keys, self.folder.load_array("signatures", name))
        for name, keys in pieces:
            self.folder.save_array("keys", name, keys)
        self.folder.save_result("deduplicate", "all", dropped)
        return dropped

    def save_tokenizer(self, pieces: Sequence[str], given: BertTokenizer | None) -> int:
        """Save the given tokenizer, or one trained on a sample of the whole corpus, where tasks look for it.

        Return the size of the sample in bytes.
        """
        done = self.folder.result("tokenizer", "all")
        if done is None:
            tokenizer, sample_bytes = (given, 0) if given else self._train(pieces)
            tokenizer.save(Path(self.job.tokenizer))
            done = {"digest": tokenizer.digest, "sample_bytes": sample_bytes}
            self.folder.save_result("tokenizer", "all", done)
        return done.get("sample_bytes", 0)

    def _train(self, pieces: Sequence[str]) -> tuple[BertTokenizer, int]:
        settings = self.job.settings
        assert settings.vocab_size is not None
        sample = TextSample([self.folder.text_path(piece) for piece in pieces], settings.tokenizer_sample_mb * 2**20)
        kind = settings.tokenizer_type or DEFAULT_TYPE
        size = f"{sample.size / 2**20:.1f} MB" if sample.size >= 2**20 else f"{sample.size / 2**10:.0f} kB"
        found = f"{size} of text" + ", evenly spread" * sample.is_part
        console.say(f"training a {kind} tokenizer of {settings.vocab_size:,} tokens on {found}")
        started = time.perf_counter()
        trained = train_tokenizer(sample, settings.vocab_size, settings.lower_case, kind)
        console.say(f"trained a tokenizer of {trained.vocab_size:,} tokens in {time.perf_counter() - started:.1f} s")
        if trained.vocab_size < settings.vocab_size:
            console.warn(
                f"the tokenizer has {trained.vocab_size:,} tokens, not the {settings.vocab_size:,} of --vocab_size: no "
                f"other parts of words occur twice in the text; give more text, or a smaller --vocab_size"
            )
        return trained, sample.size

    def cut(self, encoded: dict[str, dict[str, Any]]) -> dict[tuple[str, int], list[InstanceSet]]:
        """Return the instances by (split, length), in the order in which rows are numbered."""
        settings = self.job.settings
        tasks: list[Task] = []
        for split in SPLITS:
            found = {piece: result["splits"][split] for piece, result in encoded.items()}
            filled = [piece for piece, result in found.items() if result["documents"]]
            keys = [found[piece]["sole_key"] for piece in filled]
            for length in settings.max_seq_lengths:
                chosen = [
                    choose_donors(keys, donor_shift(settings, split, length, copy, len(filled)))
                    for copy in range(settings.copies(split))
                ]
                for i, piece in enumerate(filled):
                    donors = {str(copy): filled[numbers[i]] for copy, numbers in enumerate(chosen)}
                    tasks.append((f"{split}-{length}-{piece}", (piece, donors, split, length)))
        counts = self.run_stage("cutting", cut, tasks, "piece")
        made: dict[tuple[str, int], list[InstanceSet]] = {}
        for (_, (piece, donors, split, length)), count in zip(tasks, counts, strict=True):
            for copy, donor in donors.items():
                made.setdefault((split, length), []).append((piece, donor, int(copy), int(count[copy])))
        # Copies of the same text are as far apart as the number of copies allows.
        return {key: sorted(parts, key=lambda part: part[2]) for key, parts in made.items()}

    def write(self, made: dict[tuple[str, int], list[InstanceSet]]) -> dict[int, list[dict[str, Any]]]:
        """Return the shards by length, as the manifest lists them."""
        settings = self.job.settings
        predictions = dict(zip(settings.max_seq_lengths, settings.max_predictions, strict=True))
        tasks = [
            task
            for (split, length), parts in made.items()
            for task in plan_shards(split, length, predictions[length], parts, settings.shard_rows)
        ]
        self._forget_lost_shards(tasks)
        results = self.run_stage("writing", write, [(task.name, (task,)) for task in tasks], "shard")
        shards: dict[int, list[dict[str, Any]]] = {length: [] for length in settings.max_seq_lengths}
        for task, result in zip(tasks, results, strict=True):
            shards[task.length].append(result)
        return shards

    def _forget_lost_shards(self, tasks: Sequence[ShardTask]) -> None:
        """Forget the results of shards that an earlier run wrote and that have changed or are missing since."""
        output = open_output(self.job.output)
        sizes = {length: file_sizes(output, length) for length in self.job.settings.max_seq_lengths}
        for task in tasks:
            done = self.folder.result("writing", task.name)
            if done is not None and sizes[task.length].get(done["name"]) != done["bytes"]:
                self.folder.result_path("writing", task.name).unlink(missing_ok=True)


def run_task(function: Callable[..., Any], job: Job, stage: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run one task in this process, and save its result last, so that a killed task leaves none."""
    result = function(job, *arguments)
    job.folder.save_result(stage, name, result)
    return result


def _numbered(arguments: Iterable[tuple[Any, ...]]) -> list[Task]:
    return [(f"{number:06d}", values) for number, values in enumerate(arguments)]


def _total_counts(
    sources: Sequence[Source],
    read: Sequence[dict[str, Any]],
    dropped: dict[str, int],
    encoded: Sequence[dict[str, Any]],
) -> Counter[str]:
    """Return everything that was counted, under readable names."""
    counts: Counter[str] = Counter({f"files_of_{kind}": count for kind, count in count_formats(sources).items()})
    for result in read:
        counts.update(result["counts"])
    counts.update(dropped)
    for result in encoded:
        counts["unknown_tokens"] += result["unknown"]
        for split, found in result["splits"].items():
            counts["tokens"] += found["tokens"]
            counts[f"{split}_documents"] += found["documents"]
    return counts


def describe_damaged(paths: Sequence[str]) -> str:
    """Name the first few damaged or truncated files, and the remedy."""
    more = len(paths) - _MAX_NAMED_FILES
    named = ", ".join(paths[:_MAX_NAMED_FILES]) + f" and {more} more" * (more > 0)
    return f"damaged or cut short: {named}; copy them again from where they came"

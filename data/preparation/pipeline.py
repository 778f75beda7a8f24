"""Runs the stages of a preparation in order, each task once, on any executor."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.console import console
from common.errors import UserError
from data.preparation.duplicates import mark_repeated, mark_similar
from data.preparation.fingerprints import Fingerprint
from data.preparation.output import Storage
from data.preparation.settings import Settings
from data.preparation.tasks import (
    Job,
    RowRange,
    ShardTask,
    count_named,
    cut,
    encode,
    ingest,
    sign_documents,
    unpack_stream,
    write,
)
from data.preparation.work_folder import WorkFolder
from data.randomness import generator
from data.shards.schema import SPLITS
from data.text import sources as sources_
from data.text.sources import Source, cut_part, pack_sources
from data.tokenizer import BertTokenizer, load_tokenizer, train_tokenizer

_NAMED_FILES = 5  # in a message
_IN_FLIGHT = 4  # tasks submitted ahead per worker: enough to keep them busy, few enough to stay small

Task = tuple[str, tuple[Any, ...]]  # a name and the arguments after the job
Whole = tuple[str, int, int]  # the piece and the place in it where a document begins, and its hash


class _Sample:
    """The lines of some files, read anew each time that they are gone through."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from path.read_text(encoding="utf-8").split("\n")


class Pipeline:
    """One preparation on its way. `executor` None runs the tasks here, one after the other."""

    def __init__(self, job: Job, executor: Executor | None, workers: int) -> None:
        self.job = job
        self.folder: WorkFolder = job.folder
        self.executor = executor
        self.workers = workers

    def run_stage(self, stage: str, function: Callable[..., Any], tasks: Sequence[Task], unit: str) -> list[Any]:
        """The results of all tasks in order; those that an earlier run finished are not run again."""
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
                for i in islice(waiting, self.workers * _IN_FLIGHT - len(running)):
                    running[self.executor.submit(run_task, function, self.job, stage, *tasks[i])] = i
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()

    # --- the stages -----------------------------------------------------------------------------------------------

    def ingest(self, sources: Sequence[Source]) -> list[dict[str, Any]]:
        """Pieces of clean text. A stream, which only one worker can read, is first cut into parts."""
        sources = self._cut_named(sources)
        streams = [source for source in sources if source.is_stream]
        tasks: list[Task] = [
            (f"{number:06d}", (number, source, sources_.RANGE_BYTES)) for number, source in enumerate(streams)
        ]
        unpacked = dict(zip(streams, self.run_stage("unpacking", unpack_stream, tasks, "file"), strict=True))
        parts: list[Source] = []
        for source in sources:
            if source in unpacked:
                kind = {"wiki": "wikitext", "hf": "jsonl"}.get(source.format, source.format)
                parts += [part for path in unpacked[source]["parts"] for part in cut_part(path, kind)]
            else:
                parts.append(source)
        packs = list(pack_sources(parts))
        tasks = [(f"{number:06d}", (number, pack)) for number, pack in enumerate(packs)]
        read = join_documents(packs, self.run_stage("reading", ingest, tasks, "part"))
        return [{**result, "pieces": [], "joined": {}, "wholes": []} for result in unpacked.values()] + read

    def _cut_named(self, sources: Sequence[Source]) -> list[Source]:
        """A dataset by name as its files, each of them a stream."""
        named = [source for source in sources if source.is_named]
        tasks: list[Task] = [(f"{number:06d}", (source,)) for number, source in enumerate(named)]
        counts = dict(zip(named, self.run_stage("listing", count_named, tasks, "dataset"), strict=True))
        return [
            source._replace(start=number, stop=number + 1) if source in counts else source
            for source in sources
            for number in range(counts.get(source, 1))
        ]

    def deduplicate(self, pieces: Sequence[str], wholes: Sequence[Whole] = ()) -> dict[str, int]:
        """Keep the first of equal documents and, on request, of similar ones; returns how many were dropped.

        `wholes`: documents that several tasks have read, with their hashes.
        """
        done = self.folder.result("deduplicate", "all")
        if done is not None:
            return done
        hashes = [self.folder.load_array("hashes", piece) for piece in pieces]
        number_of = {piece: number for number, piece in enumerate(pieces)} if wholes else {}
        for piece, place, own in wholes:
            hashes[number_of[piece]][place] = own
        keep = [np.ones(len(found), dtype=bool) for found in hashes]
        dropped = {"duplicates": mark_repeated(hashes, keep), "near_duplicates": 0}
        if self.job.settings.near_duplicates is not None:
            self.run_stage("signing", sign_documents, [(piece, (piece,)) for piece in pieces], "piece")
            dropped["near_duplicates"] = mark_similar(self.folder, pieces, keep, self.job.settings.near_duplicates)
        for piece, kept in zip(pieces, keep, strict=True):
            self.folder.save_array("keep", piece, kept)
        self.folder.save_result("deduplicate", "all", dropped)
        return dropped

    def tokenizer(self, pieces: Sequence[str], given: BertTokenizer | None) -> BertTokenizer:
        """The given tokenizer, or one trained on a sample of the whole corpus; saved where tasks look for it."""

        if self.folder.result("tokenizer", "all") is not None:
            return load_tokenizer(Path(self.job.tokenizer))
        tokenizer = given or self._train(pieces)
        tokenizer.save(Path(self.job.tokenizer))
        self.folder.save_result("tokenizer", "all", {"digest": tokenizer.digest})
        return tokenizer

    def _train(self, pieces: Sequence[str]) -> BertTokenizer:
        settings = self.job.settings
        assert settings.vocab_size is not None
        limit = settings.tokenizer_sample_mb * 2**20
        sample = _Sample()
        size = 0
        for i in generator(settings.seed, "tokenizer sample").permutation(len(pieces)).tolist():
            if size >= limit:
                break
            sample.paths.append(self.folder.text_path(pieces[i]))
            size += sample.paths[-1].stat().st_size
        console.say(f"training a tokenizer of {settings.vocab_size:,} tokens on {size / 2**20:.1f} MB of text")
        started = time.perf_counter()
        trained = train_tokenizer(sample, settings.vocab_size, settings.lower_case is not False)
        console.say(f"trained a tokenizer of {trained.vocab_size:,} tokens in {time.perf_counter() - started:.1f} s")
        if trained.vocab_size < settings.vocab_size:
            console.warn(
                f"the tokenizer has {trained.vocab_size:,} tokens, not the {settings.vocab_size:,} of --vocab_size: "
                f"the text has no more parts of words that come up twice; give more text, or a smaller --vocab_size"
            )
        return trained

    def encode(self, pieces: Sequence[str], joined: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
        """`joined`: piece → how many of its first texts are of a document that began before, and its key."""
        tasks = [(piece, (piece, joined.get(piece, (0, 0)))) for piece in pieces]
        return self.run_stage("encoding", encode, tasks, "piece")

    def cut(self, encoded: dict[str, dict[str, Any]]) -> dict[tuple[str, int], list[tuple[str, str, int, int]]]:
        """(split, length) → (piece, donor, copy, number of instances), in the order in which rows are numbered."""
        settings = self.job.settings
        plans: list[tuple[str, int, str, dict[str, str]]] = []
        split: str
        for split in SPLITS:
            filled = [piece for piece, result in encoded.items() if result["splits"][split]["documents"]]
            for length in settings.max_seq_lengths:
                keys = [encoded[piece]["splits"][split]["sole_key"] for piece in filled]
                chosen = [
                    choose_donors(keys, donor_shift(settings, split, length, copy, len(filled)))
                    for copy in range(settings.copies(split))
                ]
                for i, piece in enumerate(filled):
                    donors = {str(copy): filled[numbers[i]] for copy, numbers in enumerate(chosen)}
                    plans.append((split, length, piece, donors))
        tasks = [
            (f"{split}-{length}-{piece}", (piece, donors, split, length)) for split, length, piece, donors in plans
        ]
        counts = self.run_stage("cutting", cut, tasks, "piece")
        made: dict[tuple[str, int], list[tuple[str, str, int, int]]] = {}
        for (split, length, piece, donors), count in zip(plans, counts, strict=True):
            for copy, donor in donors.items():
                made.setdefault((split, length), []).append((piece, donor, int(copy), int(count[copy])))
        # Copies of the same text lie as far apart as the number of copies allows.
        return {key: sorted(parts, key=lambda part: part[2]) for key, parts in made.items()}

    def write(self, made: dict[tuple[str, int], list[tuple[str, str, int, int]]]) -> dict[int, list[dict[str, Any]]]:
        """Shards by length, as the manifest lists them."""
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
        """Those that an earlier run wrote, and that are no longer in the output as they were."""
        output = Storage(self.job.output)
        sizes = {length: output.sizes(str(length)) for length in {task.length for task in tasks}}
        for task in tasks:
            done = self.folder.result("writing", task.name)
            if done is not None and sizes[task.length].get(done["name"]) != done["bytes"]:
                self.folder.forget("writing", task.name)


def run_task(function: Callable[..., Any], job: Job, stage: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run one task where it is, and record its result last, so that a killed task leaves none."""
    result = function(job, *arguments)
    job.folder.save_result(stage, name, result)
    return result


def join_documents(packs: Sequence[Sequence[Source]], read: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of reading, with the keys of documents that several tasks have read, each counted as one.

    `joined`: piece → how many of its first texts are of a document that began before, and its key. `wholes`: the hash
    of such a document up to here, which takes the place of what an earlier task knew. Only the first source of a pack
    can go on with the pack before: a range that another one follows fills its pack.
    """
    results = []
    key: int | None = None  # of the document that the tasks before have left open
    whole: tuple[str, int, Fingerprint] | None = None  # where it begins, and what has been read of it
    for pack, result in zip(packs, read, strict=True):
        key = key if pack[0].start > 0 else None
        joined: dict[str, tuple[int, int]] = {}
        wholes: list[Whole] = []
        counts = Counter(result["counts"])
        left = result["going_on"]
        if left and key is None:  # what came before held no text, so the document's first part is here
            counts.update(documents=1, documents_cut=-1)
            whole = (result["pieces"][0][0], 0, Fingerprint())
        if left:
            assert whole is not None
            piece, place, before = whole
            whole = piece, place, before.followed_by(Fingerprint(*result["head"]))
            wholes.append((piece, place, whole[2].hash))
        for piece, count in result["pieces"]:
            if left > 0 and key is not None:
                joined[piece] = (min(left, count), key)
            left -= count
        is_all_of_one = left == 0 and key is not None and result["open_key"] is not None
        if result["pieces"] and not is_all_of_one:
            key = result["open_key"]
        if result["open"] is not None:
            piece, place, begun = result["open"]
            whole = piece, place, Fingerprint(*begun)
        results.append({**result, "counts": counts, "joined": joined, "wholes": wholes})
    return results


def donor_shift(settings: Settings, split: str, length: int, copy: int, num_pieces: int) -> int:
    """Which piece, counted from a piece's own, gives its random segments: another one wherever there is another."""
    if num_pieces < 2:
        return 0
    return 1 + int(generator(settings.seed, "donor", split, length, copy).integers(num_pieces - 1))


def choose_donors(sole_keys: Sequence[int | None], shift: int) -> list[int]:
    """For each piece the number of the one that gives its random segments: `shift` further on, and around.

    `sole_keys` has the document that a piece is nothing but parts of. Where both pieces are parts of the same one, the
    next piece from there that is not gives them.
    """
    count = len(sole_keys)
    following = list(range(count))  # the next piece that is not of the same document only
    for number in reversed(range(2 * count)):
        here, after = number % count, (number + 1) % count
        is_same = sole_keys[after] is not None and sole_keys[after] == sole_keys[here]
        following[here] = following[after] if is_same else after
    chosen = []
    for piece, key in enumerate(sole_keys):
        donor = (piece + shift) % count
        chosen.append(following[donor] if key is not None and sole_keys[donor] == key else donor)
    return chosen


def plan_shards(
    split: str, length: int, predictions: int, parts: Sequence[tuple[str, str, int, int]], shard_rows: int
) -> list[ShardTask]:
    """Cut the numbered rows of a split into shards of at most `shard_rows`, as even as can be."""
    total_rows = sum(part[3] for part in parts)
    if total_rows == 0:
        return []
    total = -(-total_rows // shard_rows)
    ranges: list[list[RowRange]] = [[] for _ in range(total)]
    index = first = 0
    for piece, donor, copy, count in parts:
        low = first
        while low < first + count:
            end = total_rows * (index + 1) // total  # of the shard at hand
            high = min(first + count, end)
            ranges[index].append(RowRange(piece, donor, copy, low - first, high - first, low))
            low = high
            index += high == end
        first += count
    return [ShardTask(split, length, predictions, number, total, tuple(part)) for number, part in enumerate(ranges)]


def require_documents(results: Sequence[dict[str, Any]], inputs: Sequence[str]) -> list[str]:
    """The names of all pieces; an input without one usable document is the user's mistake."""
    pieces = [name for result in results for name, _ in result["pieces"]]
    if not pieces:
        broken = [path for result in results for path in result["broken"]]
        hint = f" ({describe_broken(broken)})" if broken else ""
        raise UserError(
            f"--input {' '.join(inputs)}: no document of usable text was found{hint}; give files with text in UTF-8"
        )
    return pieces


def describe_broken(paths: Sequence[str]) -> str:
    """Which files are damaged or end too early, the first few by name, and the remedy."""
    named = ", ".join(paths[:_NAMED_FILES]) + (f" and {len(paths) - _NAMED_FILES} more" if paths[_NAMED_FILES:] else "")
    return f"damaged or cut short: {named}; copy them again from where they came"

"""The tasks of a preparation. Each is a function of small arguments that reads and writes the work folder.

count    a dataset by name → how many files it is of
unpack   a stream          → parts of it as sources
ingest   some sources      → pieces of cleaned text, a hash for every document
(dedup)  all hashes        → which documents to keep
encode   a piece           → token ids, by split
cut      a piece           → instances, by split, length and copy
write    a range of rows   → one shard
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.masking import MaskingPolicy, mask_rows
from data.preparation.duplicates import GOES_ON, sign
from data.preparation.encode import Encoder
from data.preparation.fingerprints import Fingerprint
from data.preparation.instances import Documents, make_instances
from data.preparation.output import Storage
from data.preparation.rows import SpecialIds, assemble_rows
from data.preparation.settings import Settings
from data.preparation.work_folder import WorkFolder
from data.randomness import derive_key, generator
from data.shards.schema import SPLITS, Rows, concatenate_rows
from data.shards.writer import shard_bytes, shard_name
from data.text.documents import BROKEN, read_documents, unpack
from data.text.sources import Source
from data.text.tables import count_shards
from data.text.words import has_words
from data.tokenizer import BertTokenizer, load_tokenizer

PIECE_BYTES = 2 * 2**20
_ROWS_AT_ONCE = 4096  # rows assembled and masked together: what fits the processor's cache


class Job(NamedTuple):
    """What every task is told."""

    settings: Settings
    work: str
    output: str
    tokenizer: str

    @property
    def folder(self) -> WorkFolder:
        return WorkFolder(Path(self.work))


class RowRange(NamedTuple):
    """Rows [start, stop) of one piece's instances of one copy, and the number of the first in the whole split."""

    piece: str
    donor: str
    copy: int
    start: int
    stop: int
    first_number: int


class ShardTask(NamedTuple):
    split: str
    length: int
    predictions: int
    number: int
    total: int
    ranges: tuple[RowRange, ...]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.length}-{self.number:05d}-of-{self.total:05d}"


def count_named(_: Job, source: Source) -> int:
    """Of how many files a dataset by name is. Kept like any result: a run that goes on cuts it as before."""
    return count_shards(source.path)


def unpack_stream(job: Job, number: int, source: Source, part_bytes: int) -> dict[str, Any]:
    """Cut what one worker must read from the start into parts that many can clean."""
    counts: Counter[str] = Counter()
    parts: list[str] = []
    found = unpack(source, counts, job.settings.text_field)
    for first in found:
        parts.append(str(job.folder.root / "raw" / f"{number:06d}-{len(parts):06d}"))
        with Path(parts[-1]).open("wb") as stream:
            size, item = stream.write(first.content), first
            while not (item.may_end and size >= part_bytes) and (following := next(found, None)) is not None:
                size, item = size + stream.write(following.content), following
    return {"parts": parts, "counts": counts, "broken": [source.path] if counts[BROKEN] else []}


def ingest(job: Job, number: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Clean the documents of some sources into pieces.

    A document's hash tells whether it is a duplicate. Its key, the hash of its first part, decides its split and holds
    the parts of a very large one together. The first `going_on` texts are of a document that a task before has begun,
    whose key is not known here; `open_key` is that of the document which the next task may go on with.
    """
    folder = job.folder
    counts: Counter[str] = Counter()
    pieces: list[list[Any]] = []
    broken: list[str] = []
    met = _Met()
    for texts in _batches(_clean_sources(sources, job.settings, counts, broken), PIECE_BYTES):
        name = f"{number:06d}-{len(pieces):06d}"
        keys = [met.add(text, name, place) for place, text in enumerate(texts)]
        folder.text_path(name).write_text("\n".join(text.text for text in texts), encoding="utf-8")
        folder.save_array("keys", name, np.array(keys, dtype=np.uint64))
        pieces.append([name, len(texts)])
        _save_hashes(folder, met.take_settled())
    _save_hashes(folder, met.hashes)
    return {
        "pieces": pieces,
        "counts": counts,
        "broken": broken,
        "going_on": met.going_on,
        "head": met.head,
        "open_key": met.key,
        "open": [*met.begin, met.document] if met.key is not None and met.begin else None,
    }


def _save_hashes(folder: WorkFolder, hashes: dict[str, list[int]]) -> None:
    for piece, found in hashes.items():
        folder.save_array("hashes", piece, np.array(found, dtype=np.uint64))


class _Met:
    """What a task knows of the documents that it has met so far."""

    def __init__(self) -> None:
        # By piece, those that were taken left out; GOES_ON for all parts of a document but the first.
        self.hashes: dict[str, list[int]] = {}
        self.going_on = 0  # texts of a document that a task before has begun
        self.head = Fingerprint()  # of these
        self.key: int | None = None  # of the document at hand; None where it has ended
        self.document = Fingerprint()  # what has been read of the one at hand
        self.begin: tuple[str, int] | None = None  # the piece and the place in it where that began; None: before

    def add(self, text: "CleanText", piece: str, place: int) -> int:
        """The key of its document."""
        own = Fingerprint.of(text.text)
        hashes = self.hashes.setdefault(piece, [])
        hashes.append(GOES_ON)
        if not text.goes_on:
            self.document, self.begin = own, (piece, place)
            hashes[place] = own.hash
        elif self.begin is not None:
            self.document = self.document.followed_by(own)
            self.hashes[self.begin[0]][self.begin[1]] = self.document.hash
        else:
            self.going_on += 1
            self.head = self.head.followed_by(own)
        key = self.key if text.goes_on and self.key is not None else own.hash
        self.key = None if text.ends else key
        return key

    def take_settled(self) -> dict[str, list[int]]:
        """Hashes that no longer change: of the pieces before the one in which the document at hand has begun."""
        settled: dict[str, list[int]] = {}
        for piece in list(self.hashes):
            if self.begin is not None and piece == self.begin[0]:
                break
            settled[piece] = self.hashes.pop(piece)
        return settled


class CleanText(NamedTuple):
    text: str  # one sentence a line
    goes_on: bool  # whether it is a further part of the document before it
    ends: bool  # whether no further part can follow


def _clean_sources(
    sources: Sequence[Source], settings: Settings, counts: Counter[str], broken: list[str]
) -> Iterator[CleanText]:
    for source in sources:
        before = counts[BROKEN]
        yield from _clean_documents(source, settings, counts)
        if counts[BROKEN] > before:
            broken.append(source.path)


def _clean_documents(source: Source, settings: Settings, counts: Counter[str]) -> Iterator[CleanText]:
    """The source's documents, those that are too short left out."""
    for document in read_documents(source, counts, language=settings.language, text_field=settings.text_field):
        text = "\n".join(document.sentences) + "\n"
        if not document.goes_on:
            counts["documents"] += 1
            if document.ends and not has_words(text, settings.min_document_words):
                counts["documents_too_short"] += 1
                continue
        counts["sentences"] += len(document.sentences)
        yield CleanText(text, document.goes_on, document.ends)


def _batches(texts: Iterator[CleanText], limit: int) -> Iterator[list[CleanText]]:
    """Runs of texts, each just long enough to reach `limit` characters."""
    batch: list[CleanText] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def sign_documents(job: Job, piece: str) -> int:
    """A MinHash signature for every document of a piece."""
    texts = _texts(job.folder, piece)
    job.folder.save_array("signatures", piece, np.stack([sign(text) for text in texts]))
    return len(texts)


def _texts(folder: WorkFolder, piece: str) -> list[str]:
    return folder.text_path(piece).read_text(encoding="utf-8").rstrip("\n").split("\n\n")


def piece_documents(folder: WorkFolder, piece: str) -> list[list[str]]:
    """The documents of a piece that were kept, as lists of sentences."""
    documents = _texts(folder, piece)
    keep = folder.load_array("keep", piece)
    return [document.split("\n") for document, kept in zip(documents, keep, strict=True) if kept]


def encode(job: Job, piece: str, joined: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Token ids of a piece's documents, those of each split apart.

    `joined`: how many of its first texts go on with a document of a piece before, and that document's key.
    """
    folder = job.folder
    documents = piece_documents(folder, piece)
    keep = folder.load_array("keep", piece)
    keys = folder.load_array("keys", piece)
    count, key = joined
    keys[:count] = key
    keys = keys[keep]
    splits = _splits_of(keys, job.settings)
    encoder = _encoder(job.tokenizer)
    encoded = encoder.encode([sentence for document in documents for sentence in document])
    kind = np.uint16 if encoder.vocab_size <= 0xFFFF else np.uint32
    bounds = np.cumsum([0] + [len(document) for document in documents])
    result: dict[str, Any] = {"splits": {}, "unknown": int((encoded.ids == encoder.unk_id).sum())}
    starts = np.concatenate([[0], encoded.ends])
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(splits == number)
        sentences = (
            np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in chosen]) if len(chosen) else np.empty(0, int)
        )
        lengths = (encoded.ends - starts[:-1])[sentences]
        tokens = _gather(starts[sentences], lengths)
        kept = lengths > 0
        counted = (
            np.add.reduceat(kept, np.cumsum([0] + [len(documents[i]) for i in chosen])[:-1]) if len(chosen) else kept
        )
        stored = Documents(
            tokens=encoded.ids[tokens].astype(kind),
            word_starts=encoded.word_starts[tokens],
            sentence_ends=np.cumsum(lengths[kept]),
            document_ends=np.cumsum(counted[counted > 0]),
            document_keys=keys[chosen][counted > 0],
        )
        folder.save_documents(f"{split}-{piece}", stored)
        result["splits"][split] = {
            "documents": len(stored.document_ends),
            "sentences": len(stored.sentence_ends),
            "tokens": len(stored.tokens),
            "sole_key": _sole(stored.document_keys),
        }
    return result


def _sole(keys: np.ndarray) -> int | None:
    """The one document that all these are parts of, if there is only one."""
    return int(keys[0]) if len(keys) and (keys == keys[0]).all() else None


def _splits_of(keys: np.ndarray, settings: Settings) -> np.ndarray:
    """[documents] 0 training, 1 validation, 2 test: a function of the document's text and the seed alone."""
    mixed = (keys ^ np.uint64(derive_key(settings.seed, "split"))) * np.uint64(0x9E3779B97F4A7C15)
    share = (mixed >> np.uint64(11)).astype(np.float64) / 2**53
    below = settings.validation_share + settings.test_share
    return np.where(share < settings.validation_share, 1, np.where(share < below, 2, 0))


def _gather(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of several runs, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def cut(job: Job, piece: str, donors: dict[str, str], split: str, length: int) -> dict[str, int]:
    """Instances of one piece, a set for each copy; `donors`: copy → the piece that random segments come from."""
    folder = job.folder
    documents = folder.load_documents(f"{split}-{piece}")
    counts = {}
    for copy, donor in donors.items():
        donated = documents if donor == piece else folder.load_documents(f"{split}-{donor}")
        rng = generator(job.settings.seed, "instances", split, length, int(copy), piece)
        settings = job.settings
        instances = make_instances(documents, donated, settings.objective, length, settings.short_seq_prob, rng)
        folder.save_instances(instance_name(split, length, int(copy), piece), instances)
        counts[copy] = instances.num_rows
    return counts


def instance_name(split: str, length: int, copy: int, piece: str) -> str:
    return f"{split}-{length}-{copy}-{piece}"


def write(job: Job, task: ShardTask) -> dict[str, Any]:
    """Assemble, mask and shuffle one shard's rows and write them."""
    settings, folder = job.settings, job.folder
    tokenizer = _encoder(job.tokenizer).tokenizer
    special = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    policy = masking_policy(tokenizer, settings, task.predictions) if settings.is_masked(task.split) else None
    parts: list[Rows] = []
    for part in task.ranges:
        documents = folder.load_documents(f"{task.split}-{part.piece}")
        donor = documents if part.donor == part.piece else folder.load_documents(f"{task.split}-{part.donor}")
        stored = folder.load_instances(instance_name(task.split, task.length, part.copy, part.piece))
        for start in range(part.start, part.stop, _ROWS_AT_ONCE):
            instances = stored.take(slice(start, min(part.stop, start + _ROWS_AT_ONCE)))
            rows = assemble_rows(documents, donor, instances, special, task.length, task.predictions)
            if policy is not None:
                first = part.first_number + start - part.start
                numbers = np.arange(first, first + len(rows))
                seed = derive_key(settings.seed, task.split, task.length)
                rows = mask_rows(rows, policy, seed=seed, epoch=0, row_numbers=numbers)
            parts.append(rows)
    rows = concatenate_rows(parts)
    rows = rows.take(generator(settings.seed, "shuffle", task.name).permutation(len(rows)))
    name = shard_name(task.split, task.number, task.total)
    content = shard_bytes(rows, _attributes(job, task, tokenizer), compression=settings.deflate_level)
    Storage(job.output).write(f"{task.length}/{name}", content)
    return {
        "name": name,
        "split": task.split,
        "rows": len(rows),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tokens": int(rows.input_mask.sum(dtype=np.int64)),
        "predictions": int((rows.masked_lm_positions > 0).sum()),
    }


def masking_policy(tokenizer: BertTokenizer, settings: Settings, predictions: int) -> MaskingPolicy:
    return MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=predictions,
        rate=settings.masking_rate,
        unit=settings.masking_unit,
    )


def _attributes(job: Job, task: ShardTask, tokenizer: BertTokenizer) -> dict[str, Any]:
    settings = job.settings
    return {
        "max_seq_length": task.length,
        "max_predictions_per_seq": task.predictions,
        "split": task.split,
        "objective": settings.objective,
        "masked": settings.is_masked(task.split),
        "masking_unit": settings.masking_unit,
        "masking_rate": settings.masking_rate,
        "seed": settings.seed,
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "unk_id": tokenizer.unk_id,
        "cls_id": tokenizer.cls_id,
        "sep_id": tokenizer.sep_id,
        "mask_id": tokenizer.mask_id,
        "special_ids": list(tokenizer.special_ids),
    }


class _OfThread(threading.local):
    """Each thread's own encoder: it learns words as it goes, which two threads must not do in one table."""

    encoder: Encoder | None = None
    origin: tuple[str, int] | None = None


_OF_THREAD = _OfThread()


def _encoder(tokenizer: str) -> Encoder:
    """One encoder a thread: its memory of words is what makes it fast. A worker may outlive a preparation."""
    origin = (tokenizer, (Path(tokenizer) / "tokenizer.json").stat().st_mtime_ns)
    if _OF_THREAD.encoder is None or _OF_THREAD.origin != origin:
        _OF_THREAD.encoder, _OF_THREAD.origin = Encoder(load_tokenizer(Path(tokenizer))), origin
    return _OF_THREAD.encoder


def forget_words() -> None:
    """Give back what this thread's encoder remembers, tens of megabytes, when there is nothing more to encode."""
    _OF_THREAD.encoder = None

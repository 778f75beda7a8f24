"""A dataset on disk: the shards of one or more folders, checked when opened and against a run, read in blocks."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from common.errors import Problems, UserError
from data.shards.cache import ShardCache
from data.shards.folder import (
    ShardInfo,
    check_complete,
    check_like,
    check_shard,
    describe_fetched,
    find_shards,
    open_fetched,
    read_manifest,
)
from data.shards.reader import PREPARE_COMMAND, ShardFile, ShardLayout
from data.shards.schema import NO_LABEL, Rows, Split, concatenate_rows

_MAX_OPEN_FILES = 32
_NUM_FIRST_ROWS = 64  # read when a dataset is opened
_FETCHED_AHEAD = 4  # shards, where a dataset is read in file order
_MAX_TABLE_BYTES = 64 * 2**20  # tables of chunks that a dataset keeps: those of 38 million rows of our shards


class PretrainingDataset:
    """The rows of several shards, numbered from 0. Keeps a few files open and one block in memory."""

    def __init__(
        self,
        shards: Sequence[ShardInfo],
        max_predictions_per_seq: int,
        vocab_size: int | None,
        weights: Sequence[float] | None,
        cache: ShardCache | None = None,
    ) -> None:
        """`cache` has the shards that are fetched from a store, which cannot be removed while they are open."""
        self.shards = tuple(replace(shard, layout=shard.layout.without_tables()) for shard in shards)
        self._cache = cache
        self._layouts: dict[int, ShardLayout] = {}  # of files that were checked, by shard
        self._table_bytes = 0  # in these layouts
        for number, shard in enumerate(shards):
            self._remember(number, shard.layout)
        self.max_predictions_per_seq = max_predictions_per_seq
        self.vocab_size = vocab_size  # larger ids are refused; None: not known
        self.weights = None if weights is None else tuple(weights)  # one per folder
        self._first_rows = np.cumsum([0] + [shard.layout.num_rows for shard in self.shards])
        self._open: OrderedDict[int, ShardFile] = OrderedDict()  # by shard, least recently used first
        self._last_block: tuple[tuple[int, int], Rows] | None = None  # ((shard, start), rows)

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.shards)

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer that made the shards; None if no shard states it."""
        return next((digest for shard in self.shards if (digest := shard.layout.tokenizer_digest) is not None), None)

    @property
    def digest(self) -> str:
        """Identity of the data: names, row counts and digests of all shards, in order, and the weights."""
        identity = [[shard.path.name, shard.layout.num_rows, shard.digest] for shard in self.shards]
        return hashlib.sha256(json.dumps([identity, self.weights]).encode()).hexdigest()

    @property
    def is_masked(self) -> bool:
        """Whether every shard was prepared with masks."""
        return all(shard.layout.is_masked for shard in self.shards)

    @property
    def is_fetched(self) -> bool:
        """Whether shards are fetched from a store when they are needed."""
        return self._cache is not None

    def row_numbers(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Numbers in the dataset of the rows with these numbers in their shards."""
        return self._first_rows[shards] + rows

    def describe_row(self, number: int) -> str:
        """`file, row` of the row with this number, for messages about a bad batch."""
        shard, row = self._locate(number)
        return f"{self.shards[shard].path}, row {row}"

    def read(self, shard: int, start: int, stop: int, *, with_words: bool = True) -> Rows:
        """Rows [start, stop) of one shard, padded to `max_predictions_per_seq`."""
        rows = self._shard_file(shard).read(start, stop, vocab_size=self.vocab_size, with_words=with_words)
        if (self.shards[shard].layout.attributes or {}).get("objective") == "mlm":
            # Without sentence pairs the zeros in the shard are not labels.
            rows = rows.replace(next_sentence_labels=np.full(len(rows), NO_LABEL, dtype=np.int8))
        return rows.padded_to_predictions(self.max_predictions_per_seq)

    def read_range(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) by their numbers in the dataset; an empty range gives 0 rows of the right shape.

        Reads whole blocks and keeps the last one, so that reading a few rows at a time decodes nothing twice.
        """
        parts: list[Rows] = []
        while start < stop:
            shard, row = self._locate(start)
            block, offset = divmod(row, self.shards[shard].layout.block_rows)
            rows = self._read_block(shard, block)
            count = min(stop - start, len(rows) - offset)
            parts.append(rows.take(np.arange(offset, offset + count)))  # a copy: a view would keep the whole block
            start += count
        return concatenate_rows(parts) if parts else self.read(0, 0, 0)

    def aligned_range(self, number: int, size: int) -> tuple[int, int]:
        """Start and stop of the row's part of its shard, if every shard is cut into parts of `size` rows."""
        shard, row = self._locate(number)
        start = number - row % size
        return start, min(start + size, int(self._first_rows[shard + 1]))

    def read_blocks(self, shards: np.ndarray, starts: np.ndarray, stops: np.ndarray, with_words: bool = True) -> Rows:
        """Read several blocks, or parts of them, in file order and concatenate them in the given order."""
        is_next = (shards[1:] == shards[:-1]) & (starts[1:] == stops[:-1])  # neighbours are read together
        first, last = np.flatnonzero(np.append(True, ~is_next)), np.flatnonzero(np.append(~is_next, True))
        shards, starts, stops = shards[first], starts[first], stops[last]
        file_order = np.lexsort((starts, shards))
        parts = {
            i: self.read(int(shards[i]), int(starts[i]), int(stops[i]), with_words=with_words)
            for i in file_order.tolist()
        }
        return concatenate_rows([parts[i] for i in range(len(parts))])

    def fetch_ahead(self, shards: Iterable[int]) -> None:
        """Begin to fetch those of these shards that are in a store, in the order in which they will be read."""
        if self._cache is not None:
            remotes = (self.shards[shard].remote for shard in shards)
            self._cache.fetch_ahead(remote for remote in remotes if remote is not None)

    def close(self) -> None:
        """Free files and memory; they are opened and read again when needed."""
        self._last_block = None
        while self._open:
            self._open.popitem()[1].close()

    def _locate(self, number: int) -> tuple[int, int]:
        """(shard, row in the shard) of the row with this number."""
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return shard, number - int(self._first_rows[shard])

    def _read_block(self, shard: int, block: int) -> Rows:
        if self._last_block is None or self._last_block[0] != (shard, block):
            self._last_block = None  # free the memory before the next block is read
            self.fetch_ahead(range(shard, min(shard + _FETCHED_AHEAD, len(self.shards))))
            layout = self.shards[shard].layout
            start = block * layout.block_rows
            rows = self.read(shard, start, min(start + layout.block_rows, layout.num_rows))
            self._last_block = (shard, block), rows
        return self._last_block[1]

    def _shard_file(self, shard: int) -> ShardFile:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        max_open_files = _MAX_OPEN_FILES if self._cache is None or self._cache.fits_all else 1
        while len(self._open) >= max_open_files:
            self._open.popitem(last=False)[1].close()
        info, known = self.shards[shard], self._layouts.get(shard)
        if info.remote is None:
            file = ShardFile(info.path, known=known)
        else:
            assert self._cache is not None
            file = open_fetched(self._cache, info.remote, known)
            check_like(file.layout, info)
        self._remember(shard, file.layout)
        if file.layout.num_rows != info.layout.num_rows:
            raise UserError(f"{file.path}: has changed since the run began. Stop writing to it, or restart the run.")
        self._open[shard] = file
        return file

    def _remember(self, shard: int, layout: ShardLayout) -> None:
        """Keep the layout of a checked file, without its tables if those of all files would take too much memory."""
        known = self._layouts.get(shard)
        if known is not None and known.identity == layout.identity:
            return
        self._table_bytes -= 0 if known is None else known.table_bytes
        fits = self._table_bytes + layout.table_bytes <= _MAX_TABLE_BYTES
        self._layouts[shard] = layout if fits else layout.without_tables()
        self._table_bytes += self._layouts[shard].table_bytes


def open_dataset(
    folders: Sequence[Path],
    *,
    split: Split,
    max_seq_length: int,
    max_predictions_per_seq: int,
    vocab_size: int | None = None,
    weights: Sequence[float] | None = None,
    verify: bool = False,
    share: tuple[int, int] = (0, 1),
    cache: ShardCache | None = None,
) -> PretrainingDataset:
    """Find and check the shards of one split in `folders`; one UserError lists the problems of all files.

    Of a folder that `cache` mirrors, one shard is fetched and checked; the others are described by it and by the
    manifest, and are checked when they are fetched.
    `verify` also compares the files with the manifest's digests, which reads all data. Where several processes open
    the same folders, each verifies its `share` (index, number of processes) of the files.
    """
    problems, shape = Problems(), (max_seq_length, max_predictions_per_seq)
    assert weights is None or len(weights) == len(folders)
    if not folders:
        problems.add("no data folder was given. Add one to the model JSON under data.mixed_seq_datasets.")
    shards: list[ShardInfo] = []
    for number, folder in enumerate(folders):
        if folder.resolve() in [earlier.resolve() for earlier in folders[:number]]:
            problems.add(
                f"{folder}: is listed twice among the datasets of one length, so its rows would be read twice per "
                f"epoch. List it once, and give it a larger weight if it should count for more."
            )
        try:
            manifest = read_manifest(folder)
            paths = find_shards(folder, split)
        except UserError as error:
            problems.add(str(error))
            continue
        check_complete(folder, split, paths, manifest, problems)
        if cache is not None and cache.is_mirrored(folder):
            shards += problems.attempt(partial(describe_fetched, cache, paths, number, manifest, shape)) or ()
            continue
        for position, path in enumerate(paths):
            should_verify = verify and position % share[1] == share[0]
            check = partial(check_shard, path, number, manifest.get(path.name), shape, should_verify)
            if (shard := problems.attempt(check)) is not None:
                shards.append(shard)
    problems.raise_if_any()
    check_same_tokenizer(shards)
    remotes = [shard.remote for shard in shards if shard.remote is not None]
    if cache is not None and remotes:
        cache.add_dataset(remotes)
    dataset = PretrainingDataset(shards, max_predictions_per_seq, vocab_size, weights, cache)
    if vocab_size is not None:
        # Every read checks its values; reading a few rows now reports a wrong tokenizer early.
        first = next((i for i, shard in enumerate(shards) if shard.layout.identity), 0)  # one that is on this machine
        dataset.read(first, 0, min(_NUM_FIRST_ROWS, shards[first].layout.num_rows))
    return dataset


def check_same_tokenizer(shards: Sequence[ShardInfo]) -> None:
    """Refuse shards that state different tokenizers: the same id is another word in each."""
    first_of: dict[str, Path] = {}  # by tokenizer
    for shard in shards:
        if shard.layout.tokenizer_digest is not None:
            first_of.setdefault(shard.layout.tokenizer_digest, shard.path)
    if len(first_of) > 1:
        first, other, *_ = first_of.values()
        raise UserError(
            f"{other}: was made with another tokenizer than {first}. Prepare both with the same --vocab_file, or train "
            f"on one of them."
        )


def check_tokenizer(datasets: Sequence[PretrainingDataset], digest: str | None) -> None:
    """Refuse data made with another tokenizer than `digest`, if it is known, or than the other datasets."""
    for data in datasets:
        if None not in (digest, data.tokenizer_digest) and data.tokenizer_digest != digest:
            raise UserError(
                f"{data.files[0].parent}: was made with another tokenizer than the model JSON's bert_token_file. Use "
                f"the tokenizer that prepared the data, or prepare the data again."
            )
    check_same_tokenizer([shard for data in datasets for shard in data.shards])


def check_masked(data: PretrainingDataset, remedy: str) -> None:
    """Refuse shards that were prepared without masks; `remedy`: what else helps than preparing them with masks."""
    unmasked = next((shard for shard in data.shards if not shard.layout.is_masked), None)
    if unmasked is not None:
        raise UserError(
            f"{unmasked.path}: was prepared without masks (--dupe_factor 0). To use it, {remedy}, or prepare it with "
            f"--dupe_factor 1 or more."
        )


def check_disjoint(training: Sequence[PretrainingDataset], validation: PretrainingDataset) -> None:
    """Refuse a validation file that is also training data: the same file, or the same content by its digest."""
    trained = {identity: path for data in training for path, identity in _identities(data)}
    for path, identity in _identities(validation):
        if identity in trained:
            raise UserError(
                f"{path}: is validation data, but {trained[identity]} is the same file and is training data, so the "
                f"validation loss would mean nothing. Prepare a separate split with "
                f"`{PREPARE_COMMAND} --validation_share 0.01`."
            )


def _identities(data: PretrainingDataset) -> list[tuple[Path, Path | str]]:
    """Two identities of each file: its path with links resolved, and its digest."""
    return [(shard.path, identity) for shard in data.shards for identity in (shard.path.resolve(), shard.digest)]

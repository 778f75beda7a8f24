"""A dataset on disk: folders of shards, checked when opened, read block by block."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import Problems, UserError
from common.files import file_digest
from data.shards.reader import PREPARE_COMMAND, REMEDY, Identity, ShardFile
from data.shards.schema import MANIFEST_NAME, SPLITS, SUFFIXES, Rows, Split, concatenate_rows
from data.stream.order import Extent

_OPEN_FILES = 32
_FIRST_ROWS = 64


@dataclass(frozen=True)
class ShardInfo:
    """What is known of a shard without keeping it open."""

    path: Path
    folder: int  # which of the dataset's folders it lies in
    num_rows: int
    block_rows: int
    attributes: dict[str, Any] | None  # None: made elsewhere
    digest: str  # the manifest's sha256, or a digest of name, size and rows where there is no manifest
    identity: Identity  # of the file that was checked

    @property
    def is_masked(self) -> bool:
        return self.attributes is None or bool(self.attributes.get("masked", True))

    @property
    def tokenizer_digest(self) -> str | None:
        found = None if self.attributes is None else self.attributes.get("tokenizer_digest")
        return None if found is None else str(found)


class PretrainingDataset:
    """Rows of several shards under one numbering. Holds a few open files, never the corpus."""

    def __init__(
        self,
        shards: Sequence[ShardInfo],
        max_predictions_per_seq: int,
        vocab_size: int | None,
        weights: Sequence[float] | None,
    ) -> None:
        self.shards = tuple(shards)
        self.max_predictions_per_seq = max_predictions_per_seq
        self.vocab_size = vocab_size  # ids from here on are refused; None: not known
        self.weights = None if weights is None else tuple(weights)
        self._first_rows = np.cumsum([0] + [shard.num_rows for shard in self.shards])
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.shards)

    @property
    def extents(self) -> list[Extent]:
        return [Extent(shard.num_rows, shard.block_rows) for shard in self.shards]

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer that made the shards, as those that say it agree; None where none does."""
        return next((shard.tokenizer_digest for shard in self.shards if shard.tokenizer_digest is not None), None)

    @property
    def digest(self) -> str:
        """The identity of the data: names, row counts and digests of all shards, in order, and the weights."""
        identity = [[shard.path.name, shard.num_rows, shard.digest] for shard in self.shards]
        return hashlib.sha256(json.dumps([identity, self.weights]).encode()).hexdigest()

    @property
    def is_masked(self) -> bool:
        """Whether every shard carries masks of its own."""
        return all(shard.is_masked for shard in self.shards)

    def row_numbers(self, located: np.ndarray) -> np.ndarray:
        """[K] numbers within the dataset of [K, 2] (shard, row)."""
        return self._first_rows[located[:, 0]] + located[:, 1]

    def describe_row(self, number: int) -> str:
        """`file, row` of a row's number, for messages about a bad batch."""
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return f"{self.shards[shard].path}, row {number - int(self._first_rows[shard])}"

    def read(self, shard: int, start: int, stop: int) -> Rows:
        """Rows [start, stop) of one shard, with room for as many predictions in every shard."""
        rows = self._shard_file(shard).read(start, stop, vocab_size=self.vocab_size)
        attributes = self.shards[shard].attributes
        if attributes is not None and attributes.get("objective") == "mlm":
            # There are no pairs to tell apart: the shard's zeros are no labels.
            rows = rows.replace(next_sentence_labels=np.full(len(rows), -1, dtype=np.int8))
        return rows.with_room_for(self.max_predictions_per_seq)

    def read_range(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) of the dataset's own numbering; an empty range gives rows of the right shape."""
        parts: list[Rows] = []
        for shard, info in enumerate(self.shards):
            first = int(self._first_rows[shard])
            low, high = max(start, first), min(stop, first + info.num_rows)
            if low < high:
                parts.append(self.read(shard, low - first, high - first))
        return concatenate_rows(parts) if parts else self.read(0, 0, 1).take(slice(0, 0))

    def read_blocks(self, shards: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Rows:
        """Several blocks laid end to end; read in file order, returned in the order asked for."""
        parts: list[Rows | None] = [None] * len(shards)
        for i in np.lexsort((starts, shards)):
            parts[i] = self.read(int(shards[i]), int(starts[i]), int(stops[i]))
        return concatenate_rows([part for part in parts if part is not None])

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _shard_file(self, shard: int) -> ShardFile:
        """An open file, the least recently used closed first when there are many; only this one keeps decoded rows."""
        last = next(reversed(self._open), shard)
        if last != shard:
            self._open[last].forget()
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        file = ShardFile(self.shards[shard].path, checked=self.shards[shard].identity)
        if file.num_rows != self.shards[shard].num_rows:
            raise UserError(f"{file.path}: has changed since the run began; stop writing to it, or start the run again")
        self._open[shard] = file
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return file


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
) -> PretrainingDataset:
    """Find and check one split's shards in `folders`. All that is wrong with any file is reported at once.

    `verify` also compares files with the manifest's digests, a full read of the data: of every file, or of this
    process's `share` (number, of how many) where several read the same folders.
    """
    problems = Problems()
    _check_folders(folders, problems)
    shards: list[ShardInfo] = []
    for number, folder in enumerate(folders):
        try:
            manifest = read_manifest(Path(folder))
            paths = find_shards(Path(folder), split)
        except UserError as error:
            problems.add(str(error))
            continue
        _check_complete(Path(folder), split, paths, manifest, problems)
        for position, path in enumerate(paths):
            is_mine = verify and position % share[1] == share[0]
            try:
                shards.append(_check_shard(path, number, manifest, max_seq_length, max_predictions_per_seq, is_mine))
            except UserError as error:
                problems.add(str(error))
    if not folders:
        problems.add("no data folder was given; name one in the model JSON under data.mixed_seq_datasets")
    _check_weights(weights, len(folders), problems)
    problems.raise_if_any()
    _check_one_tokenizer(shards)
    dataset = PretrainingDataset(shards, max_predictions_per_seq, vocab_size, weights)
    if vocab_size is not None:
        # All values are checked as they are read; the first rows tell at once that the tokenizer is another one.
        dataset.read(0, 0, min(_FIRST_ROWS, shards[0].num_rows))
    return dataset


def split_of(path: Path) -> Split | None:
    """The one split that a file belongs to: the first of these words that its name holds. No file is in two."""
    return next((split for split in SPLITS if split in path.name), None)


def list_shards(folder: Path) -> list[Path]:
    """The HDF5 files that lie directly in `folder`, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))


def find_shards(folder: Path, split: Split) -> list[Path]:
    """The shards of one split that lie directly in `folder`, by name.

    NVIDIA's tools know `training` and `test` only: without `validation` files, the `test` files serve as validation.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; expected one with shards; check --data_path_prefix and the model JSON's "
            f"data.mixed_seq_datasets, or prepare data with `{PREPARE_COMMAND} --output_dir …`"
        )
    files = list_shards(folder)
    found = [path for path in files if split_of(path) == split]
    if not found and split == "validation":
        found = [path for path in files if split_of(path) == "test"]
    if not found:
        held = f"{len(files)} HDF5 files, but none" if files else "no HDF5 file"
        raise UserError(
            f"{folder}: has {held} with {split!r} in its name; "
            f"prepare data with `{PREPARE_COMMAND} --output_dir …`"
            + (" and a larger --validation_share" if split == "validation" and files else "")
            + ", or point the model JSON at another folder"
        )
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """name → {rows, bytes, sha256} of a folder's shards; empty where there is no manifest."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text())["files"]
        found = {str(entry["name"]): {key: entry[key] for key in ("rows", "bytes", "sha256")} for entry in files}
        for name, entry in found.items():
            if type(entry["rows"]) is not int or type(entry["bytes"]) is not int:
                raise ValueError(f"rows and bytes of {name} are no whole numbers")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is no manifest of shards ({error}); expected one that `{PREPARE_COMMAND}` wrote; {REMEDY}"
        ) from error


def _check_shard(
    path: Path, folder: int, manifest: dict[str, Any], width: int, predictions: int, verify: bool
) -> ShardInfo:
    size = path.stat().st_size if path.is_file() else 0  # what is no file is told when it is opened
    entry = manifest.get(path.name)
    if entry is not None and entry["bytes"] != size:
        raise UserError(f"{path}: has {size:,} bytes, the manifest says {entry['bytes']:,}; {REMEDY}")
    if entry is not None and verify and file_digest(path) != entry["sha256"]:
        raise UserError(f"{path}: its content is not what the manifest's sha256 says; {REMEDY}")
    file = ShardFile(path)
    try:
        if file.max_seq_length != width:
            raise UserError(
                f"{path}: rows are {file.max_seq_length} tokens wide, but --max_seq_length is {width}; "
                f"prepare data for {width} with `{PREPARE_COMMAND} --max_seq_length {width} …` "
                f"or pass --max_seq_length {file.max_seq_length}"
            )
        if file.max_predictions_per_seq > predictions:
            raise UserError(
                f"{path}: rows hold up to {file.max_predictions_per_seq} predictions, but --max_predictions_per_seq is "
                f"{predictions}; pass --max_predictions_per_seq {file.max_predictions_per_seq}"
            )
        if entry is not None and entry["rows"] != file.num_rows:
            raise UserError(f"{path}: has {file.num_rows:,} rows, the manifest says {entry['rows']:,}; {REMEDY}")
        digest = (
            entry["sha256"] if entry else hashlib.sha256(f"{path.name}:{size}:{file.num_rows}".encode()).hexdigest()
        )
        return ShardInfo(
            path, folder, file.num_rows, file.block_rows, file.attributes, str(digest), identity=file.identity
        )
    finally:
        file.close()


def _check_complete(
    folder: Path, split: Split, paths: Sequence[Path], manifest: dict[str, Any], problems: Problems
) -> None:
    """Hold the files of a split against the manifest, where there is one: all that it lists, and no others."""
    there = {path.name for path in paths}
    for name in manifest:
        if split_of(Path(name)) == split and name not in there:
            problems.add(f"{folder / name}: is missing, but {MANIFEST_NAME} lists it; {REMEDY}")
    for path in paths:
        if manifest and path.name not in manifest:
            problems.add(
                f"{path}: is not listed in the {MANIFEST_NAME} beside it, so it is of another preparation; move it "
                f"to a folder of its own"
            )


def _check_one_tokenizer(shards: Sequence[ShardInfo]) -> None:
    """The same id is another word to another tokenizer: shards that say which one made them must agree."""
    stated = [shard for shard in shards if shard.tokenizer_digest is not None]
    other = next((shard for shard in stated if shard.tokenizer_digest != stated[0].tokenizer_digest), None)
    if other is not None:
        raise UserError(
            f"{other.path}: was made with another tokenizer than {stated[0].path}; prepare both with the same "
            f"--vocab_file, or train on one of them"
        )


def check_tokenizer(datasets: Sequence[PretrainingDataset], digest: str | None) -> None:
    """Refuse data of another tokenizer than `digest`, where it is known, or than the other datasets."""
    stated = [data for data in datasets if data.tokenizer_digest is not None]
    for data in stated:
        if digest is not None and data.tokenizer_digest != digest:
            raise UserError(
                f"{data.files[0].parent}: was made with another tokenizer than the model JSON's bert_token_file; "
                f"name the tokenizer that the data was prepared with, or prepare the data again"
            )
    _check_one_tokenizer([shard for data in stated for shard in data.shards])


def check_masked(data: PretrainingDataset, remedy: str) -> None:
    """Refuse shards that were prepared without masks; `remedy`: what helps, beside preparing them with masks."""
    bare = next((shard for shard in data.shards if not shard.is_masked), None)
    if bare is not None:
        raise UserError(
            f"{bare.path}: was prepared without masks (--dupe_factor 0); {remedy}, or prepare it with --dupe_factor 1 "
            f"or more"
        )


def check_apart(training: Sequence[PretrainingDataset], validation: PretrainingDataset) -> None:
    """Refuse a validation file that is trained on too: the same file, or one of the same content by its manifest."""
    trained = {identity: path for data in training for path, identity in _identities(data)}
    for path, identity in _identities(validation):
        if identity in trained:
            raise UserError(
                f"{path}: is validation data, but {trained[identity]} is the same file and is trained on; a loss on it "
                f"would say nothing. Prepare a split of its own with `{PREPARE_COMMAND} --validation_share 0.01`"
            )


def _identities(data: PretrainingDataset) -> list[tuple[Path, object]]:
    """Each file twice: by where it lies, links followed, and by its content's digest."""
    places: list[tuple[Path, object]] = [(shard.path, shard.path.resolve()) for shard in data.shards]
    return places + [(shard.path, shard.digest) for shard in data.shards]


def _check_folders(folders: Sequence[Path], problems: Problems) -> None:
    seen: set[Path] = set()
    for folder in folders:
        if (place := Path(folder).resolve()) in seen:
            problems.add(
                f"{folder}: is named twice among the datasets of one length, so its rows would be read twice an epoch; "
                f"name it once, and give it a weight if it should count for more"
            )
        seen.add(place)


def _check_weights(weights: Sequence[float] | None, num_folders: int, problems: Problems) -> None:
    if weights is None:
        return
    if len(weights) != num_folders:
        problems.add(f"dataset weights: found {len(weights)} for {num_folders} folders; give one for each")
    if not all(weight > 0 for weight in weights):
        problems.add(
            f"dataset weights: found {list(weights)}, expected positive numbers; leave a folder out instead of 0"
        )

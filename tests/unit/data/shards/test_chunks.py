"""Chunks are decompressed to their declared size and no further, each once."""

import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards import chunks
from data.shards.reader import ShardFile
from data.shards.schema import DATASETS, concatenate_rows
from tests.unit.data.shards_on_disk import equal, make_rows, opened, read_all, replaced, write_nvidias, write_with


def deflated(size: int) -> bytes:
    """The compressed form of `size` zeros."""
    packer = zlib.compressobj(9)
    block = bytes(2**20)
    return b"".join(packer.compress(block[: size - done]) for done in range(0, size, 2**20)) + packer.flush()


def write_tall(path: Path, checksum: bool = False) -> None:
    """8192 rows of zeros in two rows of chunks."""
    with h5py.File(path, "w") as file:
        for name, (letters, kind) in DATASETS.items():
            values = np.zeros([{"N": 8192, "S": 24, "P": 4}[letter] for letter in letters], kind)
            chunks = (4096, *values.shape[1:])
            file.create_dataset(name, data=values, chunks=chunks, compression=1, fletcher32=checksum)


READ_AND_PRINT_MEMORY = """
import sys
from pathlib import Path
from common.errors import UserError
from common.memory import peak_resident_mib
from data.shards.reader import ShardFile

file = ShardFile(Path(sys.argv[1]))
file.read(0, 4096)
before = peak_resident_mib()
try:
    file.read(4096, 8192)
except UserError as error:
    print(peak_resident_mib() - before, error)
"""


@pytest.mark.parametrize("checksum", [False, True])
def test_a_bomb_in_a_later_chunk_is_refused_before_it_takes_memory(tmp_path: Path, checksum: bool) -> None:
    path = tmp_path / "training_0.hdf5"
    bomb = deflated(300 * 2**20)
    write_tall(path, checksum)
    with h5py.File(path, "r+") as file:
        content = bomb + bytes(4) if checksum else bomb
        file["input_ids"].id.write_direct_chunk((4096, 0), content)
    assert path.stat().st_size < 2**20
    arguments = [sys.executable, "-c", READ_AND_PRINT_MEMORY, str(path)]
    root = Path(__file__).parents[4]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True, cwd=root)
    grown, message = result.stdout.split(" ", 1)
    assert float(grown) < 20
    assert (
        f"{path}: is damaged or incomplete (a chunk decompresses to more than its declared size of 393,216" in message
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (deflated(25 * 24 * 4 - 4), "decompresses to 2,396 bytes, expected 2,400"),
        (deflated(25 * 24 * 4)[:-5], "a compressed chunk is truncated"),
        (b"not deflated bytes", "cannot be decompressed"),
        (bytes(3000), "chunks at a wrong offset or of an impossible size"),
    ],
)
def test_every_compressed_chunk_must_have_its_declared_size(tmp_path: Path, content: bytes, message: str) -> None:
    def change(file: h5py.File) -> None:
        replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(25, 24), compression=1)(file)
        file["input_ids"].id.write_direct_chunk((25, 0), content)

    with pytest.raises(UserError, match=message):
        read_all(write_with(tmp_path / "training_0.hdf5", change))


@pytest.mark.parametrize("size", [2396, 2400, 2403, 2405, 2408])
def test_every_uncompressed_chunk_must_have_its_declared_size(tmp_path: Path, size: int) -> None:
    """HDF5 itself would read beyond a chunk that is too short."""

    def change(file: h5py.File) -> None:
        replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(25, 24), fletcher32=True)(file)
        file["input_ids"].id.write_direct_chunk((25, 0), bytes(size))

    with pytest.raises(UserError, match="chunks at a wrong offset or of an impossible size"):
        read_all(write_with(tmp_path / "training_0.hdf5", change))


def test_the_checksum_of_an_uncompressed_chunk_is_compared(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(25, 24), fletcher32=True)(file)
        file["input_ids"].id.write_direct_chunk((25, 0), bytes(2399) + b"1" + bytes(4))

    with pytest.raises(UserError, match="is damaged or incomplete"):
        read_all(write_with(tmp_path / "training_0.hdf5", change))


def test_rows_read_few_at_a_time_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(3000))
    num_blocks = 2  # of 1,500 rows
    with h5py.File(path) as file:
        expected = sum(file[name].id.get_num_chunks() for name, (letters, _) in DATASETS.items() if len(letters) == 2)
        expected += num_blocks  # of next_sentence_labels, whose one chunk is too small to matter
        assert expected > 2 * len(DATASETS)
    decoded = []
    inflate = chunks._inflate
    monkeypatch.setattr(chunks, "_inflate", lambda *given: decoded.append(1) or inflate(*given))
    data = opened(tmp_path)
    found = concatenate_rows([data.read_range(start, min(3000, start + 7)) for start in range(0, 3000, 7)])
    assert equal(found, make_rows(3000))
    assert len(decoded) == expected


def test_the_number_of_library_calls_does_not_depend_on_the_number_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Dataset.chunks` takes longer than all checks of a chunk."""
    calls: list[int] = []
    found = h5py.Dataset.chunks.fget
    monkeypatch.setattr(h5py.Dataset, "chunks", property(lambda dataset: calls.append(1) or found(dataset)))
    counts = []
    for height in (50, 1):
        change = replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(height, 24), compression=1)
        path = write_with(tmp_path / f"training_{height}.hdf5", change)
        calls.clear()
        ShardFile(path).close()
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_only_one_block_is_kept_in_memory(tmp_path: Path) -> None:
    """Neither other open files nor the few rows that were read keep whole blocks in memory."""
    for number in range(6):
        write_tall(tmp_path / f"training_{number}.hdf5")
    data = opened(tmp_path)
    tracemalloc.start()
    try:
        rows = [data.read_range(0, 8)]
        of_one = tracemalloc.get_traced_memory()[0]
        rows += [data.read_range(number * 8192, number * 8192 + 8) for number in range(1, 6)]
        of_six = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(rows) == 6
    assert of_one > 4096 * 24 * 4
    assert of_six < 1.5 * of_one


def scattered(file: h5py.File) -> None:
    """Chunks of 25 rows by 6 columns, stored in another order than that of their rows, far from each other."""
    dataset = file.create_dataset("scattered", (50, 24), "i4", chunks=(25, 6), compression=1, shuffle=True)
    for number in np.random.default_rng(3).permutation(8).tolist():
        row, column = divmod(number, 4)
        part = slice(row * 25, row * 25 + 25), slice(column * 6, column * 6 + 6)
        dataset[part] = file["input_ids"][part]
        file[f"between_{number}"] = np.zeros(5000, np.int8)
        file.flush()
    del file["input_ids"]
    file.move("scattered", "input_ids")


def stored_as(**options: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        replaced("input_ids", data=file["input_ids"][:], **options)(file)

    return change


LAYOUTS: dict[str, Callable[[h5py.File], None]] = {
    "neighbours": lambda file: None,
    "scattered": scattered,
    "with checksums": stored_as(chunks=(7, 24), compression=1, shuffle=True, fletcher32=True),
    "big-endian": stored_as(dtype=">i8", chunks=(16, 10), compression=9, shuffle=True),
    "contiguous": stored_as(),
    "without deflate": stored_as(chunks=(20, 24), fletcher32=True),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_table_of_chunks_leads_to_the_rows_that_hdf5_reads(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_with(tmp_path / "training_0.hdf5", LAYOUTS[kind])
    layout = ShardFile(path).layout
    assert (layout.columns is None) == (kind in ("contiguous", "without deflate"))
    looked_up = ShardFile(path, known=layout.without_tables())
    files: list[Path] = []
    opening = h5py.File
    monkeypatch.setattr(
        h5py, "File", lambda name, *given, **options: files.append(name) or opening(name, *given, **options)
    )
    known = ShardFile(path, known=layout)
    assert files == ([path] if layout.columns is None else [])
    for start, stop in ((0, 50), (3, 4), (24, 26), (31, 50), (0, 25)):
        expected = make_rows(50).take(slice(start, stop))
        assert equal(known.read(start, stop), expected)
        assert equal(looked_up.read(start, stop), expected)


def test_chunks_behind_a_user_block_are_found_by_hdf5(tmp_path: Path) -> None:
    path, rows = tmp_path / "training_0.hdf5", make_rows(50)
    with h5py.File(path, "w", userblock_size=1024) as file:
        for name in DATASETS:
            file.create_dataset(name, data=getattr(rows, name), compression="gzip")
    assert equal(read_all(path), rows)
    assert ShardFile(path).layout.columns is None


def test_a_file_truncated_while_it_is_open_is_reported(tmp_path: Path) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(50))
    file = ShardFile(path)
    os.truncate(path, 100)
    with pytest.raises(
        UserError, match=r"is damaged or incomplete \(a chunk ends [\d,]+ bytes after the end of the file;"
    ):
        file.read(0, 50)


def test_rows_across_chunks(tmp_path: Path) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(3000))
    file = ShardFile(path)
    assert equal(file.read(1490, 2990), make_rows(3000).take(slice(1490, 2990)))


def test_an_empty_range_can_be_read_anywhere(tmp_path: Path) -> None:
    write_tall(tmp_path / "training_0.hdf5")
    file = ShardFile(tmp_path / "training_0.hdf5")
    for offset in (0, 100, 4096, 8192):
        rows = file.read(offset, offset)
        assert rows.input_ids.shape == (0, 24)
        assert rows.input_ids.dtype == np.int32

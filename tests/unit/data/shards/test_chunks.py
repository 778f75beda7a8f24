"""Chunks are decoded to the size that they declare and no further, each once."""

import io
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards import chunks
from data.shards.chunks import decode_chunk, fletcher32
from data.shards.dataset import open_dataset
from data.shards.reader import ShardFile
from data.shards.schema import DATASETS, concatenate_rows
from tests.unit.data.shards_on_disk import equal, make_rows, read_all, replaced, write_nvidias, write_with


def deflated(size: int) -> bytes:
    """What unpacks to so many zeros."""
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


READ_AND_TELL_MEMORY = """
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
        content = bomb + fletcher32(bomb).to_bytes(4, "little") if checksum else bomb
        file["input_ids"].id.write_direct_chunk((4096, 0), content)
    assert path.stat().st_size < 2**20
    arguments = [sys.executable, "-c", READ_AND_TELL_MEMORY, str(path)]
    root = Path(__file__).parents[4]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=True, cwd=root)
    grown, message = result.stdout.split(" ", 1)
    assert float(grown) < 20
    assert f"{path}: is damaged or incomplete (a chunk unpacks to more than the 393,216 bytes" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (deflated(25 * 24 * 4 - 4), "has 2,396 bytes where 2,400 are declared"),
        (deflated(25 * 24 * 4)[:-5], "a chunk breaks off"),
        (b"no deflated bytes", "cannot be unpacked"),
        (bytes(3000), "chunks out of place or larger than they can be"),
    ],
)
def test_every_chunk_must_be_of_its_size(tmp_path: Path, content: bytes, message: str) -> None:
    def change(file: h5py.File) -> None:
        replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(25, 24), compression=1)(file)
        file["input_ids"].id.write_direct_chunk((25, 0), content)

    with pytest.raises(UserError, match=message):
        read_all(write_with(tmp_path / "training_0.hdf5", change))


def test_rows_read_few_at_a_time_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(3000))
    with h5py.File(path) as file:
        expected = sum(file[name].id.get_num_chunks() for name in DATASETS)
        assert expected > 2 * len(DATASETS)
    decoded = []
    monkeypatch.setattr(chunks, "decode_chunk", lambda *given: decoded.append(1) or decode_chunk(*given))
    file = ShardFile(path)
    found = concatenate_rows([file.read(start, min(3000, start + 7)) for start in range(0, 3000, 7)])
    assert equal(found, make_rows(3000))
    assert len(decoded) == expected


def test_the_chunks_of_a_file_do_not_make_its_checks_ask_the_library_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Dataset.chunks` takes longer than all else that is asked of a chunk."""
    asked: list[int] = []
    found = h5py.Dataset.chunks.fget
    monkeypatch.setattr(h5py.Dataset, "chunks", property(lambda dataset: asked.append(1) or found(dataset)))
    counts = []
    for height in (50, 1):
        change = replaced("input_ids", data=np.zeros((50, 24), np.int32), chunks=(height, 24), compression=1)
        path = write_with(tmp_path / f"training_{height}.hdf5", change)
        asked.clear()
        ShardFile(path).close()
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


def test_only_the_file_in_use_keeps_decoded_rows(tmp_path: Path) -> None:
    """Neither the other open files nor the few rows that were read hold on to whole chunks."""
    for number in range(6):
        write_tall(tmp_path / f"training_{number}.hdf5")
    data = open_dataset([tmp_path], split="training", max_seq_length=24, max_predictions_per_seq=4)
    tracemalloc.start()
    try:
        rows = [data.read(0, 0, 8)]
        of_one = tracemalloc.get_traced_memory()[0]
        rows += [data.read(number, 0, 8) for number in range(1, 6)]
        of_six = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(rows) == 6
    assert of_one > 4096 * 24 * 4
    assert of_six < 1.5 * of_one


def test_rows_of_chunks_too_large_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_nvidias(tmp_path / "training_0.hdf5", make_rows(3000))
    monkeypatch.setattr(chunks, "_KEPT_BYTES", 0)
    file = ShardFile(path)
    assert equal(file.read(1490, 2990), make_rows(3000).take(slice(1490, 2990)))


def test_no_rows_can_be_read_anywhere(tmp_path: Path) -> None:
    write_tall(tmp_path / "training_0.hdf5")
    file = ShardFile(tmp_path / "training_0.hdf5")
    for place in (0, 100, 4096, 8192):
        rows = file.read(place, place)
        assert rows.input_ids.shape == (0, 24)
        assert rows.input_ids.dtype == np.int32


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 70_001, 2**18 + 6])
def test_the_checksum_is_hdf5_s(size: int) -> None:
    values = {
        "random": np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8),
        "zeros": np.zeros(size, np.uint8),
        "ones": np.full(size, 255, np.uint8),
    }
    with h5py.File(io.BytesIO(), "w") as file:
        for name, content in values.items():
            dataset = file.create_dataset(name, data=content, chunks=(size,), fletcher32=True)
            dataset.flush()
            _, stored = dataset.id.read_direct_chunk((0,))
            assert int.from_bytes(stored[-4:], "little") == fletcher32(stored[:-4])

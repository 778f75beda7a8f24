"""Randomly damaged shards give the original rows or are refused."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.errors import UserError
from data.shards import structure
from data.shards.reader import ShardFile
from data.shards.schema import ATTRIBUTE, FORMAT_VERSION
from data.shards.writer import shard_bytes
from tests.unit.data.shards_on_disk import make_rows, read_all, write_nvidias

FUZZ = """
import sys
from pathlib import Path
import numpy as np
from common.errors import UserError
from tests.unit.data.shards_on_disk import equal, read_all

source, rounds = Path(sys.argv[1]), int(sys.argv[2])
good, rng, expected = source.read_bytes(), np.random.default_rng(7), read_all(source)
target = source.with_name("fuzzed.hdf5")
for way in sys.argv[3:]:
    refused = same = 0
    for number in range(rounds):
        content, offset, size = bytearray(good), int(rng.integers(0, len(good))), int(rng.integers(1, 512))
        if way == "flips":
            for offset in rng.integers(0, len(good), rng.integers(1, 4)):
                content[offset] ^= rng.integers(1, 256)
        elif way == "flips in the head":  # where most of the metadata is
            for offset in rng.integers(0, min(4096, len(good)), rng.integers(1, 4)):
                content[offset] ^= rng.integers(1, 256)
        elif way == "zeros":  # a sector that was never written
            content[offset : offset + size] = bytes(len(content[offset : offset + size]))
        elif way == "splices":  # bytes of the file copied to another offset
            start = int(rng.integers(0, len(good)))
            part = good[start : start + size]
            content[offset : offset + len(part)] = part
        else:
            del content[offset:]
        target.write_bytes(content)
        try:
            rows = read_all(target)
        except UserError as error:
            assert str(target) in str(error)
            refused += 1
            continue
        if equal(rows, expected):
            same += 1
        else:
            target.rename(source.with_name("other_rows.hdf5"))
            raise SystemExit(f"{way}, round {number}: other rows were read")
    print(way, refused, same, sep="\t")
"""
WAYS = ("flips", "flips in the head", "zeros", "splices", "truncations")
SHARDS = {
    "ours": lambda rows: shard_bytes(rows, {"seed": 1}, compression=None),
    "ours, compressed": lambda rows: shard_bytes(rows, {"seed": 1}),
    "ours, compressed, without word starts": lambda rows: shard_bytes(rows.replace(word_starts=None), {"seed": 1}),
}


@pytest.mark.parametrize("kind", [*SHARDS, "nvidia's"])
def test_damaged_shards_read_as_the_same_rows_or_are_refused(tmp_path: Path, kind: str) -> None:
    """In a subprocess with a time limit, so that a crash or a hang of the HDF5 library fails the test."""
    path = tmp_path / "a.hdf5"
    rows = make_rows(300).replace(word_starts=np.arange(900).astype(np.uint8).reshape(300, 3))
    if kind in SHARDS:
        path.write_bytes(SHARDS[kind](rows))
    else:
        write_nvidias(path, rows)
    assert (read_all(path).word_starts is None) == (kind == "nvidia's" or "without" in kind)
    arguments = [sys.executable, "-c", FUZZ, str(path), "100", *WAYS]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[4])
    assert result.returncode == 0, result.stderr
    reported = [line.split("\t") for line in result.stdout.splitlines()]
    assert [way for way, _, _ in reported] == list(WAYS)
    assert all(int(refused) > (10 if way == "flips in the head" else 25) for way, refused, _ in reported)


def test_an_attribute_in_a_damaged_heap_is_refused(tmp_path: Path) -> None:
    """The library would loop forever. Early shards of ours store the attribute there, and other tools may."""
    path = write_nvidias(tmp_path / "a.hdf5", make_rows(50))
    with h5py.File(path, "r+") as file:
        file.attrs[ATTRIBUTE] = json.dumps({"format_version": FORMAT_VERSION})
    assert ShardFile(path).layout.attributes == {"format_version": FORMAT_VERSION}
    content = path.read_bytes()
    heap = content.index(b"GCOL")
    for begin, end in ((16, 60), (20, 2000), (24, 32)):
        path.write_bytes(content[: heap + begin] + bytes(end - begin) + content[heap + end :])
        with pytest.raises(UserError, match=r"a.hdf5: is damaged"):
            ShardFile(path)


def test_nested_heaps_are_refused_before_they_take_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is valid and ends where the first ends, so walking them all is quadratic."""
    path, nested = write_nvidias(tmp_path / "a.hdf5", make_rows(50)), 2000
    heaps = [
        b"GCOL\x01\0\0\0" + struct.pack("<Q", (nested - number) * 32 + 16) + struct.pack("<H6xQ", 1, 16)
        for number in range(nested)
    ]
    with h5py.File(path, "r+") as file:
        file.attrs[ATTRIBUTE] = json.dumps({"format_version": FORMAT_VERSION})
        file["others"] = np.frombuffer(b"".join(heaps) + bytes(16), np.uint8)
    walks: list[int | None] = []
    walk = structure._count_heap_objects
    monkeypatch.setattr(structure, "_count_heap_objects", lambda *given: walks.append(walk(*given)) or walks[-1])
    with pytest.raises(UserError, match=r"a.hdf5: is damaged \(its attribute"):
        ShardFile(path)
    assert walks[-1] is None
    assert sum(steps or 0 for steps in walks) <= path.stat().st_size // 16

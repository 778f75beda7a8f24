"""The cache of shards that are fetched from a store."""

import io
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from common import stores
from common.errors import UserError
from common.stores import Interrupted, Store
from data.shards.cache import GB, RemoteFile, ShardCache
from data.shards.dataset import PretrainingDataset, open_dataset
from data.shards.folder import read_manifest
from data.stream.loader import TrainingStream, evaluation_batches
from tests.unit.data.shards_on_disk import VOCAB_SIZE, make_rows, write_nvidias
from tests.unit.data.stores import make_shards, manifest_of, mirror, put, write_folder

URL = "memory://bucket/corpus"
SIZES = [700, 300, 20, 700, 129]


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each file of a store was opened; nothing waits between two attempts."""
    monkeypatch.setattr(stores, "WAITS", (0.0, 0.0))
    opened: Counter[str] = Counter()
    original = Store.open

    def counting(self: Store, name: str) -> Any:
        opened[name.rpartition("/")[2]] += 1
        return original(self, name)

    monkeypatch.setattr(Store, "open", counting)
    yield opened
    fsspec.filesystem("memory").store.clear()


def remote_files(cache: ShardCache, folder: Path) -> list[RemoteFile]:
    manifest = read_manifest(folder)
    return [cache.remote_of(folder / name, entry.num_bytes, entry.sha256) for name, entry in manifest.items()]


def open_training(folder: Path, cache: ShardCache | None = None) -> PretrainingDataset:
    return open_dataset(
        [folder], split="training", max_seq_length=24, max_predictions_per_seq=4, vocab_size=VOCAB_SIZE, cache=cache
    )


def used_bytes(cache: ShardCache) -> int:
    return sum(path.stat().st_size for path in cache.shards.iterdir() if path.suffix == ".hdf5")


def read_steps(data: PretrainingDataset, rank: int, num_steps: int) -> list[np.ndarray]:
    stream = TrainingStream(data, seed=7, rank=rank, world_size=2, micro_batch_size=50, gradient_accumulation_steps=2)
    steps = stream.steps(400)
    found = [next(steps).micro_batches[0].input_ids.numpy() for _ in range(num_steps)]
    steps.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("share", [None, 0.8], ids=["all fit", "a smaller cache"])
def test_the_same_rows_in_the_same_order(tmp_path: Path, share: float | None, fetched: Counter[str]) -> None:
    shards = make_shards(SIZES)
    total = sum(len(content) for _, content in shards.values())
    put(f"{URL}/24", shards)
    local = open_training(write_folder(tmp_path / "local", shards))
    cache = ShardCache(tmp_path / "cache", None if share is None else share * total / GB)
    data = open_training(mirror(cache, URL), cache)
    assert fetched == {"training_000.hdf5": 1}, "to describe all shards, one is enough"
    assert data.digest == local.digest
    assert [(s.num_rows, s.block_rows, s.unit_rows) for s in (shard.layout for shard in data.shards)] == [
        (s.num_rows, s.block_rows, s.unit_rows) for s in (shard.layout for shard in local.shards)
    ]
    for rank in (0, 1):
        for ours, theirs in zip(read_steps(data, rank, 20), read_steps(local, rank, 20), strict=True):
            assert np.array_equal(ours, theirs)
        assert used_bytes(cache) <= cache.max_bytes
    assert (cache.describe_refetching() is None) == (max(fetched.values()) == 1) == (share is None)
    pairs = zip(
        evaluation_batches(data, rank=0, world_size=1, micro_batch_size=64),
        evaluation_batches(local, rank=0, world_size=1, micro_batch_size=64),
        strict=True,
    )
    assert all(bool((ours.input_ids == theirs.input_ids).all()) for ours, theirs in pairs)


def test_processes_share_it_and_it_outlives_them(tmp_path: Path, fetched: Counter[str]) -> None:
    put(f"{URL}/24", make_shards(SIZES))
    caches = [ShardCache(tmp_path, 1.0, num_readers=4) for _ in range(4)]
    folders = [mirror(cache, URL) for cache in caches]
    failures: list[BaseException] = []

    def read(cache: ShardCache, folder: Path) -> None:
        try:
            for file in remote_files(cache, folder):
                held = cache.open(file)
                assert held.path.stat().st_size == file.num_bytes
                held.lock.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(caches, folders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(fetched.values()) == {1}


def test_the_one_used_longest_ago_is_removed_but_none_that_is_open(tmp_path: Path, fetched: Counter[str]) -> None:
    put(f"{URL}/24", make_shards([300, 300, 300, 300]))
    cache = ShardCache(tmp_path, 1.0)
    first, second, third, fourth = remote_files(cache, mirror(cache, URL))
    cache.max_bytes = 3 * max(file.num_bytes for file in (first, second, third, fourth))
    held = cache.open(first)
    for number, file in enumerate((second, third)):
        cache.open(file).lock.close()
        os.utime(cache.shards / f"{file.local_name}.lock", (1000 + number, 1000 + number))
    cache.open(fourth).lock.close()
    there = {path.name for path in cache.shards.glob("*.hdf5")}
    assert there == {first.local_name, third.local_name, fourth.local_name}
    assert held.path.exists()
    held.lock.close()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_part_is_continued(tmp_path: Path, is_right: bool, fetched: Counter[str]) -> None:
    shards = make_shards([300])
    put(f"{URL}/24", shards)
    cache = ShardCache(tmp_path, 1.0)
    (file,) = remote_files(cache, mirror(cache, URL))
    content = next(iter(shards.values()))[1]
    part = cache.shards / f"{file.local_name}.{file.num_bytes}.part"
    part.write_bytes(content[:1000] if is_right else b"x" * 1000)
    held = cache.open(file)
    assert held.path.read_bytes() == content
    assert not part.exists()
    assert set(fetched.values()) == {1 if is_right else 2}


class HalfStream(io.BytesIO):
    """A connection that ends early."""

    size = None


def test_a_store_that_fails_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, then half of the file, then the rest of it."""
    shards = make_shards([300])
    put(f"{URL}/24", shards)
    cache = ShardCache(tmp_path, 1.0)
    (file,) = remote_files(cache, mirror(cache, URL))
    content = next(iter(shards.values()))[1]
    answers = iter((ConnectionResetError("gone"), HalfStream(content[:9000]), io.BytesIO(content)))

    def answer(*_: Any) -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(Store, "open", answer)
    held = cache.open(file)
    assert held.path.read_bytes() == content
    assert next(answers, None) is None


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards([300, 200])
    put(f"{URL}/24", shards)
    cache = ShardCache(tmp_path, 1.0)
    folder = mirror(cache, URL)
    first, second = remote_files(cache, folder)
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/corpus/24/training_000.hdf5", b"other bytes")
    with pytest.raises(UserError, match=r"000\.hdf5: does not match its manifest \(found 11 bytes.*changed"):
        cache.open(first)
    system.rm("/bucket/corpus/24/training_000.hdf5")
    with pytest.raises(UserError, match="is missing, but the manifest beside it lists it"):
        cache.open(first)
    monkeypatch.setattr(Store, "open", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(UserError, match=r"001\.hdf5: failed 3 times in 0 s \(OSError: no route\)"):
        cache.open(second)
    cache.max_bytes = 20_000
    with pytest.raises(UserError, match=r"too small for 1 rank .*expected at least (\S+), and \1 to"):
        cache.add_dataset([first, second])
    with pytest.raises(UserError, match=r"--data_cache_gb 1e\+06: .* has room for"):
        ShardCache(tmp_path, 1e6)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"{URL}/24", make_shards([300]))
    cache = ShardCache(tmp_path, 1.0)
    (file,) = remote_files(cache, mirror(cache, URL))
    original = cache._write
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(cache, "_write", lambda _out, piece: original(full, piece))
        with pytest.raises(UserError, match=r"--data_cache .*: cannot be written to \(No space left on device\)"):
            cache.open(file)


def test_a_stop_request_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store never answers; the reader ends although the thread that fetches does not."""
    put(f"{URL}/24", make_shards([300]))
    cache = ShardCache(tmp_path, 1.0)
    (file,) = remote_files(cache, mirror(cache, URL))
    is_asked, answer = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        is_asked.set()
        answer.wait()
        raise OSError

    monkeypatch.setattr(Store, "open", hang)

    def stop() -> None:
        is_asked.wait()
        cache.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        cache.open(file)
    thread.join()
    answer.set()


def test_a_hostile_manifest_is_refused(tmp_path: Path) -> None:
    shards = make_shards([20])
    put(f"{URL}/24", shards)
    (row,) = shards.values()
    fsspec.filesystem("memory").pipe_file("/bucket/corpus/24/manifest.json", manifest_of({"../training.hdf5": row}))
    with pytest.raises(UserError, match=r"its entry '../training.hdf5' is not that of a shard"):
        mirror(ShardCache(tmp_path, 1.0), URL)


def test_a_shard_that_was_written_differently(tmp_path: Path) -> None:
    shards = make_shards([700, 300])
    path = write_nvidias(tmp_path / "foreign.hdf5", make_rows(300, 700))
    put(f"{URL}/24", {**shards, "training_001.hdf5": (300, path.read_bytes())})
    cache = ShardCache(tmp_path / "cache", 1.0)
    data = open_training(mirror(cache, URL), cache)
    with pytest.raises(UserError, match=r"training_001\.hdf5: was written differently .*_rows is \d+, expected"):
        data.read(1, 0, 10)

"""One run at a time uploads to a URL: a live one is not disturbed, a dead one is not waited for longer than needed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from common.errors import UserError
from common.stores import Store
from training.checkpoints import lease
from training.checkpoints.lease import FILE, Lease

HOUR = 3600.0  # longer than any test


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Nobody changes the file, and nobody waits. Of each test alone: a thread of an earlier one may still write."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", HOUR)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(lease, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(lease, "RELEASE_SECONDS", HOUR)
    yield Store(f"memory://bucket/{uuid4().hex}/runs/job", "--upload_checkpoints")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Of a run on two machines that share no disk."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path / "one", tmp_path / "other"


def test_a_live_run_is_not_disturbed(store: Store, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lease, "SILENT_SECONDS", HOUR)
    first = Lease(store)
    first.acquire(folders[0])
    with pytest.raises(UserError, match=r"/runs/job: another run uploads there \(process \d+ on .*Stop that run"):
        Lease(store).acquire(folders[1])
    assert list(folders[1].iterdir()) == []
    first.check()
    first.release()
    second = Lease(store)
    second.acquire(folders[1])  # at once: the other has ended
    second.release()


def test_a_run_that_no_longer_changes_its_file_is_dead(
    store: Store, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """If it was only out of reach, it notices that it has lost the lease, and does not take it back."""
    first, second = Lease(store), Lease(store)
    first.acquire(folders[0])
    second.acquire(folders[1])
    assert "checking for 0 s whether the run that uploaded there last" in capsys.readouterr().out
    with pytest.raises(UserError, match="another run uploads there"):
        first.check()
    first.release()
    second.check()
    assert b'"is_over": false' in store.read(FILE)


def test_a_file_that_is_being_written_is_of_a_live_run(
    store: Store, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a mounted disk shows it empty for a moment."""
    monkeypatch.setattr(lease, "SILENT_SECONDS", HOUR)
    first = Lease(store)
    first.acquire(folders[0])
    before = store.read(FILE)
    contents = iter([before, b"", before.replace(b'"count": 0', b'"count": 1')])
    monkeypatch.setattr(store, "read", lambda name: next(contents))
    with pytest.raises(UserError, match="another run uploads there"):
        Lease(store).acquire(folders[1])


def test_the_end_of_a_run_does_not_wait_for_a_store_that_hangs(
    store: Store, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the launcher kills a run that was asked to stop, before it has closed its logs."""
    monkeypatch.setattr(lease, "RELEASE_SECONDS", 0.0)
    own = Lease(store)
    own.acquire(folders[0])
    answers, outcomes = threading.Event(), []

    def hang(name: str) -> bytes:
        outcomes.append(answers.wait(60))
        raise UserError("too late")

    monkeypatch.setattr(store, "read", hang)
    own.release()
    assert outcomes == []
    answers.set()


def test_the_last_process_of_the_same_folder_has_ended(
    store: Store, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's lock says so: nothing to wait for."""
    monkeypatch.setattr(lease, "SILENT_SECONDS", HOUR)
    Lease(store).acquire(folders[0])
    again = Lease(store)
    again.acquire(folders[0])
    again.acquire(folders[0])
    again.check()


@pytest.mark.parametrize("content", [b'{"host": "worker-0"}', b"[]", b"\xff", b""])
def test_a_file_of_another_version(content: bytes, store: Store, folders: tuple[Path, Path]) -> None:
    store.write(FILE, content)
    Lease(store).acquire(folders[0])

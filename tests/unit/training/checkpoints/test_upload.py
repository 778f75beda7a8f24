"""Copies of checkpoints in a store: complete or not chosen, newest first, and never waited for."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import fsspec
import pytest

from common import stores
from common.errors import UserError
from common.stores import Store
from training.checkpoints import lease
from training.checkpoints.folder import CheckpointFolder, Retention, retire
from training.checkpoints.manifest import write_manifest
from training.checkpoints.paths import MANIFEST, MODEL_FILE, STATE, tag_of_step
from training.checkpoints.remote import RemoteCheckpoints, Uploader
from training.checkpoints.state import Best, TrainingState

URL = "memory://bucket/runs"
FRESH = TrainingState(0, 0, 0, 300, 42, 1, 0, "fp32", "", None, None, {}, is_preln=True)
MINUTE = 60.0  # a last resort


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.setattr(stores, "WAITS", (0.0,))
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def make(folder: Path, step: int, **state: object) -> str:
    checkpoint = folder / tag_of_step(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE).write_text(json.dumps(asdict(replace(FRESH, step=step, **state))))  # type: ignore[arg-type]
    (checkpoint / MODEL_FILE).write_bytes(f"weights of {step}".encode())
    write_manifest(checkpoint)
    return checkpoint.name


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_and_the_best_come_back(tmp_path: Path) -> None:
    folder, fresh = tmp_path / "run", tmp_path / "fresh"
    fresh.mkdir()
    remote = RemoteCheckpoints(URL, "job")
    tags = [make(folder, 1), make(folder, 2), make(folder, 3, best_tag=tag_of_step(1))]
    assert all(remote.upload(folder / tag) for tag in tags)
    assert remote.tags() == tags
    assert RemoteCheckpoints(URL, "job").fetch_newest(fresh, after_step=-1) == tags[2]
    assert files_of(fresh) == {name: content for name, content in files_of(folder).items() if "02/" not in name}
    assert CheckpointFolder(fresh).newest_valid() == tags[2]
    assert remote.fetch_newest(fresh, after_step=3) is None
    assert RemoteCheckpoints(URL, "another").fetch_newest(fresh, after_step=-1) is None


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("half", "it has no manifest.json: its upload was never completed"),
        ("file", f"{MODEL_FILE} has 5 bytes"),
        ("missing", f"{MODEL_FILE} is missing"),
        ("manifest", "manifest.json cannot be used"),
        ("hostile", "lists files outside of the checkpoint"),
    ],
)
def test_an_older_one_comes_back_if_the_newest_is_not_valid(
    broken: str, reason: str, tmp_path: Path, memory: fsspec.AbstractFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, fresh = tmp_path / "run", tmp_path / "fresh"
    fresh.mkdir()
    remote = RemoteCheckpoints(URL, "job")
    older, newest = make(folder, 1), make(folder, 2)
    assert remote.upload(folder / older)
    assert remote.upload(folder / newest)
    there = f"/bucket/runs/job/{newest}"
    if broken == "half":
        memory.rm(f"{there}/{MANIFEST}")
    elif broken == "missing":
        memory.rm(f"{there}/{MODEL_FILE}")
    elif broken == "file":
        memory.pipe_file(f"{there}/{MODEL_FILE}", b"other")
    else:
        files = {"../../evil": {"size": 1, "sha256": ""}} if broken == "hostile" else []
        memory.pipe_file(f"{there}/{MANIFEST}", json.dumps({"files": files}).encode())
    assert remote.fetch_newest(fresh, after_step=-1) == older
    assert [path.name for path in fresh.iterdir()] == [older]
    assert reason in capsys.readouterr().err


def test_an_upload_that_fails_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it replaces one of the same step, whose files it has overwritten in part."""
    remote = RemoteCheckpoints(URL, "job")
    tag = make(tmp_path / "run", 1)
    assert remote.upload(tmp_path / "run" / tag)
    again = make(tmp_path / "again", 1, samples=8)
    original = Store.upload

    def failing(self: Store, local: Path, name: str) -> None:
        if local.name == MODEL_FILE:
            raise UserError("the store is full")
        original(self, local, name)

    monkeypatch.setattr(Store, "upload", failing)
    with pytest.raises(UserError, match="the store is full"):
        remote.upload(tmp_path / "again" / again)
    assert MANIFEST not in remote.store.list(tag)


def test_a_run_that_loses_the_lease_during_an_upload_does_not_complete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 60 * MINUTE)
    monkeypatch.setattr(lease, "SILENT_SECONDS", 0.0)
    first, second = RemoteCheckpoints(URL, "job"), RemoteCheckpoints(URL, "job")
    (tmp_path / "second").mkdir()
    tag = make(tmp_path, 1)
    first.lease.acquire(tmp_path)
    upload = Store.upload

    def upload_later(self: Store, local: Path, name: str) -> None:
        second.lease.acquire(tmp_path / "second")
        upload(self, local, name)

    monkeypatch.setattr(Store, "upload", upload_later)
    with pytest.raises(UserError, match="another run uploads there"):
        first.upload(tmp_path / tag)
    assert MANIFEST not in first.store.list(tag)
    for remote in (first, second):
        remote.lease.release()


def test_only_the_newest_and_the_best_wait_and_what_is_uploaded_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = RemoteCheckpoints(URL, "job")
    uploader = Uploader(remote, tmp_path, Retention(keep_last=1))
    has_begun, may_end, uploaded = threading.Event(), threading.Event(), []
    original = Store.write

    def slow(self: Store, name: str, content: bytes) -> None:
        if name.endswith(MANIFEST):
            has_begun.set()
            assert may_end.wait(MINUTE)
            uploaded.append(name.partition("/")[0])
        original(self, name, content)

    monkeypatch.setattr(Store, "write", slow)
    tags = [make(tmp_path, 1)]
    uploader.offer(tags[0])
    assert has_begun.wait(MINUTE)
    for step in (2, 3, 4):
        tags.append(make(tmp_path, step))
        best = Best(tags[-1], 1.0) if step == 3 else None
        retire(tmp_path, tags, Retention(keep_last=1), best)
        uploader.offer(tags[-1], is_best=best is not None)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [tags[0], tags[2], tags[3]], "the first is read"
    assert not uploader.wait(0.0)
    uploader.report_missing()
    assert f"{tags[3]}: was not uploaded to {URL}/job; the newest of this run there is none" in capsys.readouterr().err
    may_end.set()
    assert uploader.wait(MINUTE)
    assert uploaded == [tags[0], tags[3], tags[2]]
    assert remote.tags() == [tags[2], tags[3]], "the last and the best"
    uploader.report_missing()
    assert capsys.readouterr().err == ""


def test_a_store_that_is_gone_is_reported_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploader = Uploader(RemoteCheckpoints(URL, "job"), tmp_path, Retention())
    with monkeypatch.context() as patched:
        patched.setattr(Store, "read", lambda *_: (_ for _ in ()).throw(UserError("no route to the store")))
        uploader.offer(make(tmp_path, 1))
        assert uploader.wait(MINUTE)
    uploader.report_missing()
    text = capsys.readouterr().err
    assert "no route to the store. step_00000001 was not uploaded; training continues" in text
    assert "was not uploaded to memory://bucket/runs/job (no route to the store); the newest of this run there" in text
    uploader.offer(make(tmp_path, 2))
    assert uploader.wait(MINUTE)
    uploader.report_missing()
    assert capsys.readouterr().err == ""

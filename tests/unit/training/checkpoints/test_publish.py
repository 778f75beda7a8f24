"""Publishing a checkpoint: the one that it replaces stays valid until then, on any file system."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.checkpoints import writer as publishing
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.manifest import write_manifest
from training.checkpoints.paths import STATE
from training.checkpoints.writer import exchange, publish, recover

TAG = "step_00000007"


def make(folder: Path, samples: int) -> Path:
    """A checkpoint that find_damage() accepts."""
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps({"zero_stage": 0, "world_size": 1, "samples": samples}))
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    write_manifest(folder)
    return folder


def samples_of(folder: Path) -> int:
    return int(json.loads((folder / TAG / STATE).read_text())["samples"])


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_valid_checkpoint_is_replaced(can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_exchange:
        monkeypatch.setattr(publishing, "exchange", lambda *_: False)
    make(tmp_path / TAG, 56)
    publish(make(tmp_path / ".saving" / TAG, 64), tmp_path / TAG)
    assert samples_of(tmp_path) == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saving", TAG]
    assert CheckpointFolder(tmp_path).newest_valid() == TAG


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    (make(tmp_path / TAG, 56) / STATE).write_text("gone")
    publish(make(tmp_path / ".saving" / TAG, 64), tmp_path / TAG)
    assert samples_of(tmp_path) == 64
    assert (tmp_path / f"{TAG}.damaged" / STATE).read_text() == "gone"


@pytest.mark.parametrize("is_new_there", [False, True])
def test_a_kill_between_two_renames_is_recovered_from(is_new_there: bool, tmp_path: Path) -> None:
    make(tmp_path / f".replaced_{TAG}", 56)
    make(tmp_path / ".saving" / TAG, 64)
    if is_new_there:
        make(tmp_path / TAG, 64)
    recover(tmp_path)
    assert samples_of(tmp_path) == (64 if is_new_there else 56)
    assert [path.name for path in tmp_path.iterdir()] == [TAG]


def test_two_folders_exchange_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "a", tmp_path / "b"), "Linux can, on every local file system"
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()
    assert not exchange(tmp_path / "a", tmp_path / "lost")


def test_a_valid_checkpoint_stays_if_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    make(tmp_path / TAG, 56)
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "lost", tmp_path / TAG)
    assert samples_of(tmp_path) == 56
    assert [path.name for path in tmp_path.iterdir()] == [TAG]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that took it for one would start again from step 0."""

    def deny(*_: object) -> None:
        raise PermissionError

    make(tmp_path / TAG, 56)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, deny)
    for find in (CheckpointFolder(tmp_path).newest_valid, CheckpointFolder(tmp_path).tags):
        with pytest.raises(PermissionError):
            find()


@pytest.mark.parametrize("has_call", [True, False])
def test_a_system_without_an_exchange(has_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library whose kernel refuses, or which lacks the call."""
    library = SimpleNamespace(renameat2=lambda *_: -1) if has_call else SimpleNamespace()
    monkeypatch.setattr(publishing.ctypes, "CDLL", lambda *_, **__: library)
    assert not exchange(tmp_path / "a", tmp_path / "b")

"""A run without a shared disk: data behind a URL, and uploaded checkpoints that outlive the disk."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import pytest
import torch

from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from common.stores import Store
from data.shards.schema import DATASETS, Rows
from data.shards.writer import shard_bytes
from deepspeed_train import main
from tests.support import write_project
from tests.unit.data.stores import put, write_folder
from tests.unit.training.in_process import own_environment, run_here

CORPUS, RUNS = "memory://bucket/corpus", "memory://bucket/runs"


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """The launcher's words for data of ours on the disk, which is in a store too."""
    words = write_project(tmp_path)
    shards = {}
    for path in sorted((tmp_path / "data").iterdir()):
        with h5py.File(path) as file:
            rows = Rows(**{name: file[name][:] for name in DATASETS})
        shards[path.name] = len(rows), shard_bytes(rows, {})
        path.unlink()
    write_folder(tmp_path / "data", shards)
    put(f"{CORPUS}/data", shards)
    yield words
    fsspec.filesystem("memory").store.clear()


def remote_words(words: list[str], folder: Path, *more: str) -> list[str]:
    store = ("--data_path_prefix", CORPUS, "--data_cache", str(folder / "cache"), "--upload_checkpoints", RUNS)
    return [*words, "--output_dir", str(folder / "remote"), *store, *more]


def weights_of(output: Path, step: int) -> dict[str, Any]:
    path = output / "saved_models" / "tiny" / f"step_{step:08d}" / "mp_rank_00_model_states.pt"
    return dict(torch.load(path, weights_only=False)["module"])


def losses(output: Path) -> list[tuple[str, float]]:
    rows = [json.loads(line) for line in (output / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["mlm_loss"]) for row in rows if "mlm_loss" in row and row["step"] > 3]


def test_a_new_machine_goes_on_with_the_same_bits(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here([*words, "--max_steps", "6"])
    run_here(remote_words(words, tmp_path, "--max_steps", "3"))
    shutil.rmtree(tmp_path / "remote")
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    run_here(remote_words(words, tmp_path, "--max_steps", "6"))
    shown = capsys.readouterr()
    assert f"fetching {RUNS}/tiny/step_00000003" in shown.out
    assert "not uploaded" not in shown.err
    ours, theirs = weights_of(tmp_path / "remote", 6), weights_of(tmp_path / "out", 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(tmp_path / "remote") == losses(tmp_path / "out")
    assert {"step_00000003", "step_00000006"} <= Store(f"{RUNS}/tiny", "").list().keys()


def test_a_stop_while_a_shard_is_fetched(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store hangs after two shards; then SIGTERM comes. The run ends as on any stop, and continues later."""
    original, answer = Store.open, threading.Event()
    opened: list[str] = []

    def hang(self: Store, name: str) -> Any:
        if name not in opened:
            opened.append(name)
        if "training" in name and len(opened) > 2:
            os.kill(os.getpid(), signal.SIGTERM)  # to the process: this is not the main thread
            answer.wait()
        return original(self, name)

    with monkeypatch.context() as patched, own_environment():
        patched.setattr(Store, "open", hang)
        patched.setattr("data.stream.row_source._WINDOWS_FETCHED", 1)
        code = main(remote_words(words, tmp_path, "--max_steps", "6"))
        answer.set()
    assert code == STOPPED_EXIT_CODE
    assert "(SIGTERM); the same command resumes from here" in capsys.readouterr().out
    run_here(remote_words(words, tmp_path, "--max_steps", "6"))


def test_a_store_that_is_gone_is_one_message(words: list[str], tmp_path: Path) -> None:
    fsspec.filesystem("memory").rm("/bucket/corpus/data/manifest.json")
    with own_environment(), pytest.raises(UserError) as raised:
        main(remote_words(words, tmp_path, "--upload_checkpoints", "gopher://x"))
    text = str(raised.value)
    assert text.startswith("2 problems were found:")
    assert f"{CORPUS}/data/manifest.json: does not exist; expected the manifest of the shards there" in text
    assert "--upload_checkpoints gopher://x: cannot be used" in text

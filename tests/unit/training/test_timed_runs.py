"""Whole runs with a time budget, on a clock that only steps and commits advance."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.processes import STOPPED_EXIT_CODE
from deepspeed_train import main
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import own_environment, run_here
from training import clock as run_clock
from training import loop
from training.checkpoints import writer as checkpoint
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.metrics.health import Health
from training.metrics.window import MetricsWindow
from training.plan.time_budget import Budget

STEP_SECONDS, COMMIT_SECONDS = 1.0, 5.0


class Clock:
    """A simulated clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], None]] = {}
        patch.setattr("time.perf_counter", lambda: self.now)
        patch.setattr(run_clock, "Budget", self.budget)
        patch.setattr(MetricsWindow, "seconds_per_step", lambda _window: STEP_SECONDS)
        self.slow_down(patch, loop, "all_ranks_take_step", STEP_SECONDS)
        self.slow_down(patch, checkpoint, "write_manifest", COMMIT_SECONDS)
        save = checkpoint.CheckpointWriter.all_ranks_save

        def save_and_wait(self: checkpoint.CheckpointWriter, *args: Any) -> None:
            save(self, *args)
            self.join()  # a thread would advance the clock at a step that depends on the machine

        patch.setattr(checkpoint.CheckpointWriter, "all_ranks_save", save_and_wait)

    def budget(self, total: float | None, **options: Any) -> Budget:
        return Budget(total, **{**options, "clock": lambda: self.now, "began": self.now})

    def slow_down(self, patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.now += seconds
            self.at.get(self.now, lambda: None)()
            return original(*args, **options)

        patch.setattr(owner, name, slow)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in read_metrics(folder, "train")]


def test_the_last_checkpoint_is_there_when_the_time_is_over(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commit takes longer than the 3 seconds reserved at first; the first checkpoint has measured it."""
    words = [*write_project(tmp_path), "--time_budget", "100s", "--lr_schedule", "linear", "--save_every_steps", "20"]
    run_here(words)
    assert 85 < clock.now <= 100
    found = rates(tmp_path)
    peak = found.index(max(found))
    assert found[:peak] == sorted(found[:peak])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert found[peak] > 0.9 * 0.003
    assert found[-1] < 0.3 * 0.003
    capsys.readouterr()
    run_here(words)
    assert rates(tmp_path) == found  # the time is over: nothing more is trained
    newest = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny").choose(None)
    assert f"start        from {tmp_path / 'out' / 'saved_models' / 'tiny' / newest}\n" in capsys.readouterr().out


def test_the_warm_up_ends_by_the_clock_however_many_steps_the_schedule_has(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plateau warning comes after the warm-up: a tenth of the time. In steps of this schedule it never ends."""
    monkeypatch.setattr("training.metrics.health.PLATEAU_STEPS", 10)
    monkeypatch.setattr("training.metrics.health.PLATEAU_MARGIN", 100.0)
    monkeypatch.setattr("training.metrics.health.MIN_LABELS", 1)
    warned: list[int] = []
    check = Health.check

    def note(self: Health, step: int, *given: Any) -> list[str]:
        sentences = check(self, step, *given)
        warned.extend(step for sentence in sentences if "unigram level" in sentence)
        return sentences

    monkeypatch.setattr(Health, "check", note)
    words = write_project(tmp_path)
    model = tmp_path / "model.json"
    model.write_text(model.read_text().replace('"total_training_steps": 60', '"total_training_steps": 1000000'))
    run_here([*words, "--time_budget", "100s", "--max_steps", "22", "--ckpt_to_save", "100"])
    assert warned == [20]  # 10 steps after the first that ends at 9.7 s or later
    assert "the batch is small (8 rows per step)" in capsys.readouterr().err


def test_stopped_midway_and_resumed_it_ends_in_time_too(clock: Clock, tmp_path: Path) -> None:
    """The restart saves only at its end, and knows from the saved state how long that takes."""
    words = [*write_project(tmp_path), "--time_budget", "100s", "--lr_schedule", "linear"]
    clock.at[30.0] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with own_environment():
        assert main([*words, "--save_every_steps", "20"]) == STOPPED_EXIT_CODE
    assert 30 < clock.now < 40
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    state = read_state(checkpoints.folder / checkpoints.choose(None))
    assert state.longest_pause == COMMIT_SECONDS
    lost = clock.now - state.seconds  # between the save and the end of the process
    clock.at.clear()
    run_here([*words, "--ckpt_to_save", "100000"])
    assert 80 < clock.now - lost <= 100
    peak = rates(tmp_path).index(max(rates(tmp_path)))
    assert rates(tmp_path)[peak:] == sorted(rates(tmp_path)[peak:], reverse=True)
    assert rates(tmp_path)[-1] < 0.3 * 0.003

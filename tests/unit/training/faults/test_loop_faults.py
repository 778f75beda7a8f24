"""The loop when something goes wrong, in whole tiny runs: bad steps, failed commits, rollbacks, stops, skips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from deepspeed_train import main
from tests.support import read_metrics, write_json, write_project
from tests.unit.training.in_process import own_environment, run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.saving import Saver
from training.checkpoints.state import TrainingState, read_state
from training.checkpoints.writer import CheckpointWriter
from training.engine import build
from training.faults.spikes import Spike, SpikeDetector
from training.inputs import datasets
from training.metrics.window import StepLoss
from training.validation import Validator

BATCH = 8


def saved_states(folder: Path) -> dict[int, TrainingState]:
    """By step, of the checkpoints."""
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    states = [read_state(checkpoints.folder / tag) for tag in checkpoints.tags()]
    return {state.step: state for state in states}


def spoil(monkeypatch: pytest.MonkeyPatch, *micro_steps: int) -> None:
    """Make the loss of these micro-steps, counted from 1, NaN."""
    count = 0
    plain = build.spoil_unless_finite

    def spoiled(loss: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return plain(loss * torch.nan if count in micro_steps else loss)

    monkeypatch.setattr(build, "spoil_unless_finite", spoiled)


def test_a_rollback_after_a_failed_commit_goes_to_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = CheckpointWriter.commit
    spikes = iter([7])

    def fail_once(self: CheckpointWriter, staged: Path, *rest: Any) -> None:
        if staged.name == "step_00000006" and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError(28, "No space left on device")
        plain(self, staged, *rest)

    def find(_self: SpikeDetector, steps: list[StepLoss]) -> list[Spike]:
        at = next((step for step in steps if step.step == 7), None)
        return [Spike(at, 1.0)] if at is not None and next(spikes, None) else []

    monkeypatch.setattr(CheckpointWriter, "commit", fail_once)
    monkeypatch.setattr(SpikeDetector, "find", find)
    flags = ["--max_steps", "9", "--save_every_steps", "3", "--on_spike", "rollback"]
    run_here([*write_project(tmp_path), *flags])
    said = capsys.readouterr().err
    assert "the last checkpoint was not saved" in said
    assert "needs 0.0 MB" not in said
    assert f"rolled back to step 3; samples {6 * BATCH} to {7 * BATCH - 1} are skipped" in said
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, 10))
    assert {step: state.samples for step, state in saved_states(tmp_path).items()} == {
        3: 3 * BATCH,
        6: 6 * BATCH,
        7: 8 * BATCH,  # the end of an epoch of 64 rows, of which 8 were skipped
        9: 10 * BATCH,
    }


def test_a_stop_during_a_validation_takes_no_further_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*write_project(tmp_path), "--max_steps", "6", "--validate_every_steps", "2"]
    plain = Validator.all_ranks_measure

    def stopped(self: Validator) -> dict[str, float] | None:
        if self.clock.progress.step == 4:
            self.stop.request("SIGTERM")
        return plain(self)

    with monkeypatch.context() as patched, own_environment():
        patched.setattr(Validator, "all_ranks_measure", stopped)
        assert main(words) == STOPPED_EXIT_CODE
    assert list(saved_states(tmp_path)) == [4]
    assert [row["step"] for row in read_metrics(tmp_path, "validation")] == [2]
    run_here(words)
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]


def test_an_overdue_save_after_a_skipped_step_and_a_stop_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both checkpoints are of step 2; the second has seen more rows, and replaces the first."""
    spoil(monkeypatch, 3, 4)
    samples: list[int] = []
    plain = Saver._all_ranks_save

    def save(self: Saver, best: Any) -> None:
        samples.append(self.progress.samples)
        plain(self, best)

    def is_overdue(self: Saver) -> bool:
        if self.progress.samples == 3 * BATCH:
            self.stop.request("SIGTERM")  # which the ranks exchange after the next step
        return self.progress.samples == 3 * BATCH

    monkeypatch.setattr(Saver, "_all_ranks_save", save)
    monkeypatch.setattr(Saver, "is_overdue", is_overdue)
    with own_environment():
        assert main([*write_project(tmp_path), "--max_steps", "6"]) == STOPPED_EXIT_CODE
    assert samples == [3 * BATCH, 4 * BATCH]
    assert {step: state.samples for step, state in saved_states(tmp_path).items()} == {2: 4 * BATCH}


def test_too_many_bad_steps_before_the_first_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1, 2)
    words = write_project(tmp_path)
    with pytest.raises(UserError, match="No step had been applied before, so there is nothing to save") as caught:
        run_here([*words, "--max_steps", "6", "--max_bad_steps", "2"])
    assert f"write [[0, {2 * BATCH}]] to" in str(caught.value)
    assert not saved_states(tmp_path)
    # What the message asks for, before there is any checkpoint.
    write_json(tmp_path / "out" / "saved_models" / "tiny" / "skips.json", [[0, 2 * BATCH]])  # type: ignore[arg-type]
    monkeypatch.undo()
    run_here([*words, "--max_steps", "2"])
    assert [row["samples"] for row in read_metrics(tmp_path, "train")] == [3 * BATCH, 4 * BATCH]
    assert saved_states(tmp_path)[2].skips == ((0, 2 * BATCH),)


def test_a_rank_that_cannot_read_rows_while_it_is_built_says_so_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise UserError("shard.hdf5: cannot be read")

    asked: list[bool] = []
    plain = build.collectives.all_ranks_any

    def note(*flags: bool) -> list[bool]:
        asked.append(flags[0])
        return plain(*flags)

    monkeypatch.setattr(datasets, "mean_tokens", fail)
    monkeypatch.setattr(build.collectives, "all_ranks_any", note)
    with pytest.raises(UserError, match="cannot be read"):
        run_here([*write_project(tmp_path), "--max_steps", "1"])
    assert asked[-1], "the other ranks must learn of it, or they would wait"


def test_a_run_whose_validation_is_not_finite_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Validator.all_ranks_measure

    def spoiled(self: Validator) -> dict[str, float] | None:
        figures = plain(self)
        assert figures is not None
        return {**figures, "mlm_loss": float("nan"), "perplexity": float("inf")}

    monkeypatch.setattr(Validator, "all_ranks_measure", spoiled)
    run_here([*write_project(tmp_path), "--max_steps", "2", "--export_dir", str(tmp_path / "hf")])
    lines = (tmp_path / "out" / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    (row,) = (row for line in lines if (row := json.loads(line))["kind"] == "validation")
    assert row["mlm_loss"] == "nan"
    assert "Not known here" in (tmp_path / "hf" / "README.md").read_text()

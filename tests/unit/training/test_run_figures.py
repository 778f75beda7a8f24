"""What a run measures and shows: metrics, the live bar, gradients, library logs."""

import re
import sys
from pathlib import Path

import h5py
import pytest

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import losses, run_here
from training.engine.gradients import GradientWatch
from training.metrics.window import MetricsWindow


def test_figures_of_a_run_are_complete_and_plausible(tmp_path: Path) -> None:
    losses(tmp_path, train_micro_batch_size_per_gpu=2)
    for row in read_metrics(tmp_path, "train"):
        assert 0 < row["grad_norm"] < 100
        assert 0 < row["padding_share"] < 0.5
        assert 0.01 < row["masking_rate"] < 0.4
        assert 0 < row["matmul_share"] < 1
        assert row["memory_gib"] > 0.05
        split = sum(row[key] for key in row if key.startswith("seconds_") and key != "seconds_per_step")
        pauses = row["seconds_checkpoint"] + row["seconds_validation"]
        assert split - pauses == pytest.approx(row["seconds_per_step"] * row["window_steps"], rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_norm_is_that_of_fp32(stage: int, tmp_path: Path) -> None:
    norms = []
    for precision in ("fp32", "bf16"):
        losses(tmp_path / precision, "--precision", precision, zero_optimization={"stage": stage})
        norms.append([row["grad_norm"] for row in read_metrics(tmp_path / precision, "train")])
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.parametrize("print_steps", ["1", "3"])
def test_gradients_are_watched_for_the_first_steps_only(
    print_steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[int] = []
    end_step = GradientWatch.end_step

    def note(self: GradientWatch) -> list[str]:
        names = end_step(self)
        hooks.append(sum(handle.id in handle.hooks_dict_ref() for handle in self.handles))
        return names

    monkeypatch.setattr(GradientWatch, "end_step", note)
    losses(tmp_path, "--print_steps", print_steps)
    assert hooks[0] > 0
    assert hooks[1:] == [0] * 4


def test_a_head_without_gradient_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards without masked tokens train the sentence head only."""
    words = write_project(tmp_path)
    for path in (tmp_path / "data").glob("*training*"):
        with h5py.File(path, "r+") as file:
            file["masked_lm_positions"][:] = 0
            file["masked_lm_ids"][:] = 0
    run_here([*words, "--max_steps", "3"])
    warnings = capsys.readouterr().err
    assert "parameters got no gradient in the first steps: cls.predictions" in warnings
    assert warnings.count("got no gradient") == 1


def test_the_live_bar_before_the_first_report_and_its_time_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    monkeypatch.setattr("tqdm.std.tqdm.set_postfix_str", lambda _self, text, refresh=True: texts.append(text))
    monkeypatch.setattr("training.metrics.window.READ_SECONDS", 0.0)
    monkeypatch.setattr(MetricsWindow, "seconds_per_step", lambda _self: 1.0)
    losses(tmp_path, "--print_steps", "3", "--save_every_minutes", "100", "--max_steps_per_epoch", "4")
    assert [re.sub(r"[\d.]+ so far  lr .*  first", "… first", text) for text in texts[:2]] == [
        "epoch 0.12  loss … first report at step 3",
        "epoch 0.25  loss … first report at step 3",
    ]
    assert "next save in" in texts[2]


def test_a_terminal_gets_a_live_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    losses(tmp_path)
    line = capsys.readouterr().err.rsplit("\r", 1)[-1]
    for words in ("5/5", "epoch 0.6", "loss ", "lr ", "ETA 0:00", "next save in 0:00"):
        assert words in line
    assert re.search(r"[\d,]+ tokens/s  matmul \d+%", line)


def test_library_logs_are_in_a_file_and_not_on_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses(tmp_path)
    said = capfd.readouterr()
    assert "DeepSpeed info" not in said.out + said.err
    assert "DeepSpeed info" in (tmp_path / "out" / "runs" / "tiny" / "logs" / "rank_0.log").read_text()

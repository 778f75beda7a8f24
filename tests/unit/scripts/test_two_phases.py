"""Two phases as one command: what phase 2 starts from, and where an interrupted command resumes."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from scripts import two_phases
from scripts.two_phases import Chain, check_phases, main, read_phases, remaining_phases
from tests.support import make_rows, read_metrics, with_slow_steps, write_json, write_nvidia_shard, write_project
from tests.unit.training.in_process import run_here
from training.plan.learning_rate import Schedule

SHORT, LONG = 16, 24
PASSED_ON = ["--print_steps", "1"]


def write_phases(folder: Path, first_steps: int = 6) -> list[str]:
    """A project with rows of both lengths; the recipe's words."""
    write_project(folder, width=LONG)
    for index in range(2):
        rows = make_rows(20, SHORT, 4, seed=index)
        write_nvidia_shard(folder / "short" / f"wiki_training_{index}.hdf5", rows)
    path = folder / "model.json"
    content = json.loads(path.read_text())
    content["data"]["mixed_seq_datasets"][str(SHORT)] = {"wiki": "short"}
    content["mixed_seq_training"][str(SHORT)] = {
        **content["mixed_seq_training"][str(LONG)],
        "total_training_steps": first_steps,
    }
    content["mixed_seq_training"][str(LONG)]["total_training_steps"] = 20
    del content["validation"]
    path.write_text(json.dumps(content))
    engine = str(folder / "deepspeed.json")
    return [
        *("--cf", str(path), "--deepspeed_configs", engine, engine, "--output_dir", str(folder / "out")),
        *("--name", "two", "--lengths", str(SHORT), str(LONG), "--predictions", "4", "4"),
    ]


def test_interrupted_in_phase_two_it_resumes_there_without_another_warmup(tmp_path: Path) -> None:
    phases = read_phases([*write_phases(tmp_path), *PASSED_ON, "--data_path_prefix", str(tmp_path)])
    assert remaining_phases(phases) == phases
    run_here(phases[0].words)
    assert [row["step"] for row in read_metrics(tmp_path, "train", f"two_{SHORT}")] == list(range(1, 7))
    assert remaining_phases(phases) == phases  # phase 1 will say that it is finished

    run_here([*phases[1].words, "--max_steps", "5"])  # stands for an interruption
    assert remaining_phases(phases) == phases[1:]
    run_here(phases[1].words)
    rows = read_metrics(tmp_path, "train", f"two_{LONG}")
    assert [row["step"] for row in rows] == list(range(7, 27))
    schedule = Schedule("LE", peak=0.003, total_steps=20, warmup_proportion=0.1, origin=6)
    assert [row["learning_rate"] for row in rows] == pytest.approx([schedule.rate(step) for step in range(6, 26)])


def test_equal_lengths_are_refused(tmp_path: Path) -> None:
    words = [*write_phases(tmp_path), "--lengths", "16", "16"]
    with pytest.raises(UserError, match="must differ"):
        read_phases(words)


def passed_on(folder: Path) -> list[str]:
    return [*PASSED_ON, "--data_path_prefix", str(folder), "--ranks", "1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 1}}, "ZeRO stage 0 in fp32, but this run uses stage 1 in fp32"),
        ({"bf16": {"enabled": True}}, "stage 0 in fp32, but this run uses stage 0 in bf16"),
        ({"optimizer": {"type": "Muon"}}, "the optimizer adamw, but this run uses muon"),
    ],
)
def test_phases_that_cannot_follow_each_other_are_refused_before_the_first(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    words = write_phases(tmp_path)
    engine = json.loads((tmp_path / "deepspeed.json").read_text())
    other = write_json(tmp_path / "other.json", {**engine, **change})
    words += ["--deepspeed_configs", str(tmp_path / "deepspeed.json"), str(other)]
    phases = read_phases([*words, *passed_on(tmp_path)])
    with pytest.raises(UserError, match="phase 2 cannot start from phase 1") as caught:
        check_phases(phases)
    assert message in str(caught.value)
    check_phases(phases[1:])  # phase 2 resumes from its own checkpoint


def test_a_mistake_is_not_reported_with_a_folder_that_phase_one_will_write(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        main([*write_phases(tmp_path), *passed_on(tmp_path), "--set", "gradient_clipping=-1"])
    assert "phase 2: " in str(caught.value)
    assert "no such folder" not in str(caught.value)


def test_a_launcher_that_ends_with_0_before_the_last_step_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*write_phases(tmp_path), *passed_on(tmp_path)]
    started = []

    def end_at_once(_self: Chain, command: list[str]) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(Chain, "run", end_at_once)
    assert main(words) == 1
    assert len(started) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [(2, "would end the same way"), (1, "resumes from its last checkpoint"), (STOPPED_EXIT_CODE, "resumes from")],
)
def test_the_advice_follows_the_code(
    code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Chain, "run", lambda *_: code)
    assert main([*write_phases(tmp_path), *passed_on(tmp_path)]) == code
    assert f"phase 1 ended with code {code}; " in (advice := capsys.readouterr().err)
    assert message in advice


def test_a_dry_run_tries_both_phases_where_the_second_has_something_to_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_self: Chain, command: list[str]) -> int:
        run_here(command)
        return 0

    monkeypatch.setattr(Chain, "run", run)
    monkeypatch.setattr(two_phases, "launch_command", lambda *_: [])
    words = [*write_phases(tmp_path), *passed_on(tmp_path)]
    assert main([*words, "--dry_run"]) == 0
    said = capsys.readouterr()
    assert said.out.count("dry run: nothing was written") == 1
    assert "phase 2: flags, files and data are valid; it can be tried once phase 1 has a checkpoint" in said.out
    assert "ended with code" not in said.err
    assert not (tmp_path / "out").exists()

    phases = read_phases(words)
    run_here([*phases[0].words, "--max_steps", "2"])
    capsys.readouterr()
    assert main([*words, "--dry_run"]) == 0
    assert capsys.readouterr().out.count("dry run: nothing was written") == 2
    assert not phases[1].checkpoints.folder.exists()


@pytest.mark.parametrize("starter", ["python", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_interrupted_in_phase_one_it_resumes_and_finishes_both(
    starter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command's main(). The `deepspeed` launcher costs ten seconds a start more than plain python does."""
    if starter == "python":
        monkeypatch.setattr(two_phases, "launch_command", lambda *_: [sys.executable, "deepspeed_train.py"])
    words = [*write_phases(tmp_path, first_steps=150), *passed_on(tmp_path), "--save_every_steps", "10"]
    checkpoints = tmp_path / "out" / "saved_models" / f"two_{SHORT}"

    def interrupt() -> None:
        while not list(checkpoints.glob("step_*")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    of_other_tests = set(psutil.Process().children(recursive=True))  # multiprocessing's own helpers stay for good
    threading.Thread(target=interrupt, daemon=True).start()
    with monkeypatch.context() as patch:
        if starter == "python":  # slow steps, so that the phase is not over before it is interrupted
            patch.setattr(two_phases, "launch_command", lambda *_: with_slow_steps([]))
        assert main(words) == STOPPED_EXIT_CODE
    of_the_phase = set(psutil.Process().children(recursive=True)) - of_other_tests
    _, orphans = psutil.wait_procs(of_the_phase, timeout=300)
    assert orphans == []
    stopped = len(read_metrics(tmp_path, "train", f"two_{SHORT}"))
    assert stopped < 150
    assert not (tmp_path / "out" / "saved_models" / f"two_{LONG}").exists()

    assert main(words) == 0
    assert [row["step"] for row in read_metrics(tmp_path, "train", f"two_{SHORT}")] == list(range(1, 151))
    assert [row["step"] for row in read_metrics(tmp_path, "train", f"two_{LONG}")] == list(range(151, 171))

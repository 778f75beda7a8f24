"""A run keeps the libraries of its matrix products: on resume, before its first checkpoint, on all ranks."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from nvidia.cpu.libraries import Libraries
from nvidia.fastest import Measured
from tests.support import write_project
from tests.unit.training.in_process import run_here
from training import libraries as module
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.paths import CPU_LIBRARIES, STATE
from training.checkpoints.state import read_state
from training.libraries import choose_libraries, read_record

ONEDNN, MIXED = Libraries("onednn", "onednn", "onednn"), Libraries(forward="onednn")
MEASURED = Measured(MIXED, {"forward": {"torch": 1.2, "onednn": 1.0}})


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Let runs measure; what they find is the list's last."""
    monkeypatch.delenv("CPU_PRODUCTS", raising=False)
    found = [MEASURED]
    monkeypatch.setattr(module, "measure_libraries", lambda *_: found[-1])
    return found


@pytest.mark.parametrize(
    ("record", "is_resumed", "expected", "said"),
    [
        (None, False, ("here", MIXED), ""),
        (("here", ONEDNN), True, ("here", ONEDNN), ""),
        (("there", ONEDNN), True, ("here", MIXED), "was on another processor (there; now here); results may differ"),
        (None, True, ("here", MIXED), "the checkpoint does not say which libraries"),
    ],
)
def test_a_choice_is_kept_on_the_same_kind_of_processor(
    record: tuple[str, Libraries] | None,
    is_resumed: bool,
    expected: tuple[str, Libraries],
    said: str,
    measuring: list[Measured],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, words = choose_libraries(record, "here", lambda: MEASURED, is_resumed)
    assert found == expected
    assert words.startswith("forward onednn")
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) == bool(said)


def test_a_small_model_has_no_choice_and_a_forced_one_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CPU_PRODUCTS")
    assert choose_libraries(None, "here", lambda: Measured(Libraries()), True) == (None, "torch")
    assert not capsys.readouterr().out
    monkeypatch.setenv("CPU_PRODUCTS", "torch")
    found, words = choose_libraries(("here", MIXED), "here", lambda: MEASURED, True)
    assert (found, words) == (("here", Libraries()), "torch, by CPU_PRODUCTS")
    assert "CPU_PRODUCTS names other libraries than this run has used" in capsys.readouterr().out


def test_a_run_keeps_its_libraries(
    tmp_path: Path, measuring: list[Measured], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = write_project(tmp_path)
    run_here([*arguments, "--max_steps", "2"])
    assert "forward onednn (1.20 × torch)" in capsys.readouterr().out
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    saved = checkpoints.folder / checkpoints.choose(None)
    state = read_state(saved)
    assert state.cpu_libraries == MIXED
    assert read_record(checkpoints.folder, None) == read_record(checkpoints.folder, saved) == (state.processor, MIXED)

    measuring.append(Measured(ONEDNN, {"forward": {"torch": 2.0, "onednn": 1.0}}))
    run_here([*arguments, "--max_steps", "4"])
    assert read_state(checkpoints.folder / checkpoints.choose(None)).cpu_libraries == MIXED


def test_states_and_records_of_earlier_versions_or_damaged_ones(tmp_path: Path) -> None:
    assert read_record(tmp_path, None) is None
    for content in ("", "[1]", json.dumps(["here", {**asdict(MIXED), "forward": "mkl"}])):
        (tmp_path / CPU_LIBRARIES).write_text(content)
        assert read_record(tmp_path, None) is None
    old = next((Path(__file__).parents[2] / "data").rglob(STATE))
    assert "cpu_libraries" not in json.loads(old.read_text())
    assert read_state(old.parent).cpu_libraries is None
    assert read_record(tmp_path, old.parent) is None

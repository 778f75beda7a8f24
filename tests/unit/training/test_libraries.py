"""A run keeps the libraries of its matrix products: on resume, before its first checkpoint, on all ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvidia.cpu.libraries import Libraries, in_use, use
from nvidia.fastest import Measured
from tests.support import write_project
from tests.unit.training.in_process import run_here
from tests.unit.training.test_state_fuzz import GOOD
from training import libraries as module
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.paths import CPU_LIBRARIES, STATE
from training.checkpoints.state import read_state
from training.libraries import all_ranks_choose_libraries, choose_libraries, read_record

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


@pytest.mark.parametrize("processor", ["rank 0's", "another"])
def test_a_rank_with_another_processor_measures_for_itself(
    processor: str, measuring: list[Measured], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice of rank 0 is in the state on all ranks."""
    of_main = ("rank 0's", ONEDNN)
    monkeypatch.setattr(module, "describe_processor", lambda: processor)
    monkeypatch.setattr(module.collectives, "all_ranks_from_main", lambda _: (of_main, "onednn"))
    monkeypatch.setattr(module.collectives, "all_ranks_gather", lambda own: ["rank 0's", own])
    settings = SimpleNamespace(
        lengths=[SimpleNamespace(micro=2, length=8)], model_config=None, precision="fp32", saved_models=Path("unused")
    )
    before = in_use()
    try:
        state, words = all_ranks_choose_libraries(GOOD, None, settings, torch.device("cpu"))  # type: ignore[arg-type]
        assert in_use() == (ONEDNN if processor == of_main[0] else MIXED)
    finally:
        use(before)
    assert ((state.processor, state.cpu_libraries), words) == (of_main, "onednn")
    assert ("the ranks have different processors" in capsys.readouterr().err) == (processor != of_main[0])


def test_states_and_records_of_earlier_versions_or_damaged_ones(tmp_path: Path) -> None:
    assert read_record(tmp_path, None) is None
    for content in ("", "[1]", json.dumps(["here", {**asdict(MIXED), "forward": "mkl"}])):
        (tmp_path / CPU_LIBRARIES).write_text(content)
        assert read_record(tmp_path, None) is None
    old = next((Path(__file__).parents[2] / "data").rglob(STATE))
    assert "cpu_libraries" not in json.loads(old.read_text())
    assert read_state(old.parent).cpu_libraries is None
    assert read_record(tmp_path, old.parent) is None

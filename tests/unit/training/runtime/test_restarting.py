"""--max_restarts of `python` alone: who may use it, and what its parent leaves for a supervisor above."""

from pathlib import Path

import pytest

import deepspeed_train
from common.errors import UserError
from common.outcome import OUTCOME_VARIABLE, read_outcome
from common.supervision import Supervisor
from training.runtime.restarting import restart_alone, without_flag

ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
MANY_TASKS = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables, and a child that ends with 0 at once."""
    for name in ("RANK", "MASTER_ADDR", *MANY_TASKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Supervisor, "run", lambda _self, _command: 0)
    return monkeypatch


@pytest.mark.parametrize("variables", [{}, ONE_TASK], ids=["no launcher", "one task of srun"])
def test_a_world_of_one_may_start_itself_again(variables: dict[str, str], alone: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        alone.setenv(name, value)
    assert restart_alone(2) == 0


@pytest.mark.parametrize("variables", [{"RANK": "0"}, MANY_TASKS], ids=["a launcher", "several tasks of srun"])
def test_a_rank_of_several_may_not(variables: dict[str, str], alone: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        alone.setenv(name, value)
    with pytest.raises(UserError, match=r"--max_restarts 2: .*scripts/supervise.py --max_restarts 2"):
        restart_alone(2)


def test_the_parent_leaves_its_childs_outcome(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone.setenv(OUTCOME_VARIABLE, str(tmp_path / "outcome"))
    assert deepspeed_train.main(["--cf", "a.json", "--output_dir", str(tmp_path), "--max_restarts", "1"]) == 0
    assert read_outcome(tmp_path / "outcome") == 0


def test_the_child_has_the_same_words_but_for_the_flag() -> None:
    words = ["python", "deepspeed_train.py", "--seed", "7"]
    assert without_flag([*words, "--max_restarts=1", "--max_restarts", "2", "--deepspeed"]) == [*words, "--deepspeed"]

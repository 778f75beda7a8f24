"""A run killed at any stage of a save ends as if undisturbed: the short version of the kill campaign."""

from pathlib import Path

import pytest

from tests.faults.saving import REPLACE_STAGES, SAVE_STAGES
from tests.kill_campaign import REPLACED_STEP, Kill, Setup, Trace, interrupt, leave_alone
from tests.rank_server import RankServer

TWO_RANKS = Setup(zero_stage=1, num_ranks=2)


@pytest.fixture(scope="module")
def undisturbed(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, float]:
    return leave_alone(rank_server, TWO_RANKS, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_killed_at_a_stage_of_a_save(
    stage: str, undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path
) -> None:
    hits, differences = interrupt(rank_server, TWO_RANKS, [Kill(stage)], tmp_path, undisturbed[0])
    assert hits == 1, "the kill must have hit"
    assert differences == []


# The short run covers the stages at which ranks other than 0 matter most.
OTHER_VICTIMS = [(stage, victim) for stage in SAVE_STAGES for victim in ("all", "launcher")]
IN_SHORT_RUN = [("between_files", "launcher"), ("rename", "all")]


@pytest.mark.parametrize(
    ("stage", "victim"),
    [pytest.param(*case, marks=() if case in IN_SHORT_RUN else pytest.mark.slow) for case in OTHER_VICTIMS],
)
def test_all_ranks_or_the_launcher_killed_at_a_stage_of_a_save(
    stage: str, victim: str, undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path
) -> None:
    hits, differences = interrupt(rank_server, TWO_RANKS, [Kill(stage, victim=victim)], tmp_path, undisturbed[0])
    assert hits == 1, "the kill must have hit"
    assert differences == []


REPLACING = Setup(zero_stage=0, num_ranks=1, is_replacing=True)


@pytest.fixture(scope="module")
def replaced(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return leave_alone(rank_server, REPLACING, tmp_path_factory.mktemp("replaced"))[0]


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == "set_aside" else pytest.mark.slow) for stage in REPLACE_STAGES]
)
def test_killed_while_a_valid_checkpoint_is_replaced(
    stage: str, replaced: Trace, rank_server: RankServer, tmp_path: Path
) -> None:
    """It is the only one: if it were missing for a moment, the next start would refuse the folder."""
    kill = Kill(stage, step=REPLACED_STEP)
    hits, differences = interrupt(rank_server, REPLACING, [kill], tmp_path, replaced)
    assert hits == 1, "the kill must have hit"
    assert differences == []
    folder = tmp_path / "out" / "saved_models" / "tiny"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [f"step_{REPLACED_STEP:08d}"]


def test_killed_outside_of_a_save(undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path) -> None:
    """One rank after the first metrics, then all ranks while they start."""
    kills = [Kill(is_late=True, victim=1), Kill(after=0.5, is_early=True, victim="all")]
    hits, differences = interrupt(rank_server, TWO_RANKS, kills, tmp_path, undisturbed[0])
    assert hits == 2
    assert differences == []


def test_a_killed_launcher(undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path) -> None:
    """Once while the ranks start, once while they train: they notice, save and exit."""
    kills = [Kill(after=0.3, is_early=True, victim="launcher"), Kill(is_late=True, victim="launcher")]
    hits, differences = interrupt(rank_server, TWO_RANKS, kills, tmp_path, undisturbed[0])
    assert hits == 2
    assert differences == []


@pytest.mark.parametrize(
    "setup", [Setup(0, 1), Setup(2, 2), Setup(3, 2), Setup(1, 1, "fp16")], ids=lambda setup: setup.name
)
def test_killed_in_other_setups(setup: Setup, rank_server: RankServer, tmp_path: Path) -> None:
    expected, _ = leave_alone(rank_server, setup, tmp_path / "alone")
    hits, differences = interrupt(rank_server, setup, [Kill("rename", step=6)], tmp_path / "killed", expected)
    assert hits == 1
    assert differences == []
    assert len(expected.losses) == 8

"""Killed with SIGKILL at every stage of a save, a run ends as if nothing had happened: the campaign's short version."""

from pathlib import Path

import pytest

from tests.faults.saving import SAVE_STAGES
from tests.kill_campaign import Kill, Setup, Trace, interrupt, leave_alone
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


def test_killed_at_random_moments(undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path) -> None:
    seconds = undisturbed[1]
    kills = [Kill(after=seconds * 0.6, rank=1), Kill(after=seconds * 0.9, rank=None)]
    hits, differences = interrupt(rank_server, TWO_RANKS, kills, tmp_path, undisturbed[0])
    assert hits >= 1
    assert differences == []


def test_a_killed_launcher(undisturbed: tuple[Trace, float], rank_server: RankServer, tmp_path: Path) -> None:
    """Once while the ranks begin, once while they train: they notice, save what there is, and leave."""
    kills = [Kill(after=share * undisturbed[1], is_launcher=True) for share in (0.2, 0.7)]
    hits, differences = interrupt(rank_server, TWO_RANKS, kills, tmp_path, undisturbed[0])
    assert hits >= 1
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

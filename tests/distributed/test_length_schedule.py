"""Rows that grow on the way, on other numbers of ranks and through kills: the same batches, the same losses."""

import signal
from pathlib import Path

import pytest

from tests.distributed.test_ranks import losses, without_dropout
from tests.rank_server import RankServer
from tests.support import read_metrics, write_two_lengths

TOLERANCE = 2e-5  # fp32 sums in another order
KILLS = (2, 5, 8, 12)  # after so many steps: rows of both lengths see some of them


def samples(folder: Path) -> list[int]:
    return [row["samples"] for row in read_metrics(folder, "train")]


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_change_before_and_after_the_switch(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    for name, parts in (("whole", [(1, 12)]), ("parts", [(1, 3), (2, 9), (1, 12)])):
        words = write_two_lengths(tmp_path / name, zero_optimization={"stage": stage})
        without_dropout(tmp_path / name)
        for num_ranks, last_step in parts:
            outcome = rank_server.run([*words, "--max_steps", str(last_step)], num_ranks, tmp_path)
            assert outcome.codes == [0] * num_ranks, outcome.text
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert samples(parts) == samples(whole)
    assert losses(parts) == pytest.approx(losses(whole), abs=TOLERANCE)


def test_killed_again_and_again(rank_server: RankServer, tmp_path: Path) -> None:
    flags = ["--max_steps", "16", "--save_every_steps", "1", "--keep_last", "2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert rank_server.run([*write_two_lengths(whole), *flags], 2, tmp_path).codes == [0, 0]
    words = [*write_two_lengths(broken), *flags]
    figures = str(broken / "out" / "runs" / "tiny" / "metrics.jsonl")
    slow = [{"kind": "slow_steps", "seconds": 0.2}]  # or a run could be over before it is killed
    for steps in KILLS:
        kill = {"once": figures, "lines": steps, "ranks": [0, 1], "signal": int(signal.SIGKILL)}
        outcome = rank_server.run(words, 2, tmp_path, faults=slow, signals=[kill])
        assert outcome.codes == [-signal.SIGKILL] * 2, outcome.text
    outcome = rank_server.run(words, 2, tmp_path)
    assert outcome.codes == [0, 0], outcome.text
    assert samples(broken) == samples(whole)
    assert losses(broken) == losses(whole)

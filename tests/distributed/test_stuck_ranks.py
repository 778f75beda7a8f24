"""Ranks that are slow, stuck or never come are named."""

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from common.processes import STUCK_EXIT_CODE
from tests.distributed.runs import BATCH
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_slow_rank_is_told_by_work_that_is_its_own(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    """The fast rank waits in the backward pass, at stage 3 in the forward pass too, so both seem to take as long."""
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--print_steps", "2", "--max_steps", "4"]
    waiting = {"kind": "slow_clock", "rank": 0, "seconds": 30.0, "of": ["forward" if stage == 3 else "backward"]}
    slow = {"kind": "slow_clock", "rank": 1, "seconds": 30.0, "of": ["forward", "product"]}
    outcome = rank_server.run(words, 2, tmp_path, faults=[waiting, slow])
    assert outcome.codes == [0, 0], outcome.text
    last = read_metrics(tmp_path, "train")[-1]
    assert last["slowest_rank"] == 1.0
    assert last["slowest_over_fastest_rank"] > 1.5


def impatient(folder: Path, *hanging: dict[str, Any]) -> list[dict[str, Any]]:
    """Ranks that hang, and a watchdog that has waited long enough for them after two seconds of that."""
    file = str(folder / "hanging")
    return [{**fault, "file": file} for fault in (*hanging, {"kind": "impatient", "seconds": 2.0})]


@pytest.mark.parametrize("how", ["asleep", "stopped"])
def test_a_stuck_rank_is_named(how: str, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "3"]
    faults = impatient(tmp_path, {"kind": "hang", "rank": 1, "next_sample": 3 * BATCH, "how": how})
    outcome = rank_server.run(
        words, 2, tmp_path, faults=[*faults, {"kind": "short_collectives", "seconds": 1}], grace=2.0
    )
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text
    if how == "asleep":  # a stopped process cannot tell where it is
        assert "is stuck in data_wait at step 2" in outcome.text


def test_the_first_to_leave_lets_the_others_speak(rank_server: RankServer, tmp_path: Path) -> None:
    """Three ranks: one is stuck, one has to tell, and the third must not take both down before that."""
    words = [*write_project(tmp_path, train_batch_size=6), "--max_steps", "10", "--stuck_after_minutes", "3"]
    faults = impatient(tmp_path, {"kind": "hang", "rank": 1, "next_sample": 18})
    faults.append({"kind": "slow_to_tell", "rank": 0, "seconds": 1.5})
    outcome = rank_server.run(words, 3, tmp_path, faults=faults, grace=0.2)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text


def test_a_rank_that_is_stuck_before_the_loop_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "3"]
    faults = impatient(tmp_path, {"kind": "hang_in_build", "rank": 1})
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, grace=2.0)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text
    assert "is stuck in preparing the weights" in outcome.text


def test_a_rank_that_is_stuck_in_the_engine_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    """In deepspeed.initialize() no rank has come further than another, and a collective must not give up first."""
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "3"]
    faults = impatient(tmp_path, {"kind": "hang_in_initialize", "rank": 0})
    faults.append({"kind": "short_collectives", "seconds": 1})
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, grace=2.0)
    assert outcome.codes[1] == STUCK_EXIT_CODE, outcome.text
    assert "rank 0 (host" in outcome.text
    assert "is stuck in building the engine at step 0, " in outcome.text
    assert "tests/faults/starting.py:" in outcome.text, "the line it is at"
    assert "rank 1 (host" not in outcome.text
    assert "Traceback" not in outcome.text


# A compiler that does not come to its end, and one that only pretends to compile.
ENDLESS = """#!/bin/sh
touch "$(dirname "$0")/started"
exec sleep 60
"""


PRETENDING = """#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then touch "$2"; fi
    shift
done
"""


def test_a_run_that_was_killed_while_it_compiled_keeps_nobody_waiting(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / "tiny.cpp").write_text("")
    (folder / "c++").write_text(ENDLESS)
    (folder / "c++").chmod(0o755)
    compiling = {"kind": "compile", "folder": str(folder)}
    killed = rank_server.run(words, 2, tmp_path, faults=[{**compiling, "dies": True}])
    assert -signal.SIGKILL in killed.codes, killed.text
    assert (folder / "lock").exists()
    (folder / "c++").unlink()  # still running
    (folder / "c++").write_text(PRETENDING)
    (folder / "c++").chmod(0o755)
    again = rank_server.run(words, 2, tmp_path, faults=[compiling])
    assert again.codes == [0, 0], again.text
    assert again.text.count("extension/lock: was left by a run that died while compiling") == 1
    assert not (folder / "lock").exists()


def test_ranks_that_never_come_are_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, train_batch_size=12), "--max_steps", "2"]
    faults = [{"kind": "late", "rank": rank, "seconds": 600} for rank in (1, 3)]
    faults.append({"kind": "short_join", "seconds": 3})
    # The two that come do so together, on a machine that is slow for a moment too.
    faults += [{"kind": "meeting", "rank": rank, "file": str(tmp_path / "2"), "waits": rank == 0} for rank in (0, 2)]
    outcome = rank_server.run(words, 4, tmp_path, faults=faults, grace=1.0)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert outcome.text.count("error: ") == 1
    assert "error: 2 of the 4 ranks did not join at 127.0.0.1:" in outcome.text
    assert f"within 3 s: rank 1, 3. The others run on {socket.gethostname()}. Check its log" in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.slow  # the others leave it to rank 0 to speak, for some seconds
def test_a_first_rank_that_never_comes_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    faults = [{"kind": "late", "rank": 0, "seconds": 600}, {"kind": "short_join", "seconds": 2}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, grace=1.0)
    assert outcome.codes[1] == STUCK_EXIT_CODE, outcome.text
    assert "error: rank 0 did not join at 127.0.0.1:" in outcome.text
    assert "Traceback" not in outcome.text

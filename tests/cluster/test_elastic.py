"""torchrun --nnodes 1:2: a machine that is lost costs the steps since the last checkpoint, and is taken in again."""

import signal
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.cluster.machines import Machine, started, wait_until
from tests.cluster.runs import documented, newest_step, printed, training
from tests.integration.test_launcher_ends import write_endless
from tests.support import read_metrics

Machines = tuple[Machine, Machine]


def torchrun(words: list[str]) -> list[str]:
    *agent, script = documented("torchrun --nnodes 2:4", {"2:4": "1:2", "8": "1"})
    # torch takes a machine for lost after three missed heartbeats of 5 seconds, which a busy one can miss.
    return [*agent, "--rdzv-conf", "last_call_timeout=8,keep_alive_max_attempt=24", script, *words]


def wait_for_ranks(folder: Path, ranks: str, times: int) -> None:
    """Until a run on so many ranks was started `times` times, and has saved."""
    wait_until(lambda: printed(folder).count(ranks) >= times, f"a start on {ranks.strip()}")
    before = newest_step(folder)
    wait_until(lambda: newest_step(folder) > before + 10, f"checkpoints on {ranks.strip()}")


def test_a_machine_is_lost_and_comes_back(machines: Machines, tmp_path: Path) -> None:
    command = torchrun([*write_endless(tmp_path), "--stuck_after_minutes", "2"])
    first, second = machines
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as stack:
        stack.enter_context(started(second, command, tmp_path / "second.txt", **env))
        agent = stack.enter_context(training(first, command, tmp_path, **env))
        wait_for_ranks(tmp_path, "× 2 ranks", 1)
        alone = printed(tmp_path).count("× 1 rank\n")  # if an agent started long before the other
        second.lose_power()
        wait_for_ranks(tmp_path, "× 1 rank\n", alone + 1)
        together = printed(tmp_path).count("× 2 ranks")
        second.mend_link()
        stack.enter_context(started(second, command, tmp_path / "second.txt", **env))
        wait_for_ranks(tmp_path, "× 2 ranks", together + 1)
        psutil.Process(agent.pid).children()[0].send_signal(signal.SIGTERM)
        wait_until(lambda: not first.ranks() and not second.ranks(), "the end of all ranks")
    rows = read_metrics(tmp_path, "train")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no step is missing or twice"
    assert {row["samples"] - 8 * row["step"] for row in rows} == {0}, "the same global batches"

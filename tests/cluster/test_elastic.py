"""torchrun --nnodes 1:2: a machine that is lost costs the steps since the last checkpoint, and is taken in again."""

import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.cluster.machines import Machine, started, wait_until
from tests.cluster.runs import OUTPUT, printed, saved_step, training
from tests.integration.test_launcher_ends import write_endless
from tests.support import read_metrics

Machines = tuple[Machine, Machine]


def torchrun(words: list[str]) -> list[str]:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "worker-0:29400", "--rdzv-id", "bert"]
    agent = ["torchrun", "--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "3", *meeting]
    return [*agent, "--rdzv-conf", "last_call_timeout=8", "deepspeed_train.py", *words]


def lose(machine: Machine) -> None:
    """Its power fails: no process says goodbye."""
    machine.cut_link()
    for process in machine.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_machine_is_lost_and_comes_back(machines: Machines, tmp_path: Path) -> None:
    command = torchrun([*write_endless(tmp_path), "--stuck_after_minutes", "0.5"])
    first, second = machines
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as stack:
        stack.enter_context(started(second, command, tmp_path / "second.txt", **env))
        agent = stack.enter_context(training(first, command, tmp_path, **env))
        assert "× 2 ranks" in printed(tmp_path)
        before = saved_step(tmp_path)
        lose(second)
        wait_until(lambda: "× 1 rank\n" in printed(tmp_path), 240, "a run on one machine")
        wait_until(lambda: saved_step(tmp_path) > before + 10, 60, "checkpoints of one machine")
        second.mend_link()
        stack.enter_context(started(second, command, tmp_path / "second.txt", **env))
        wait_until(lambda: printed(tmp_path).count("× 2 ranks") == 2, 240, "a run on two machines again")
        before = saved_step(tmp_path)
        wait_until(lambda: saved_step(tmp_path) > before + 10, 120, "checkpoints of two machines")
        psutil.Process(agent.pid).children()[0].send_signal(signal.SIGTERM)
        wait_until(lambda: not first.ranks() and not second.ranks(), 60, "ranks still run")
    rows = read_metrics(tmp_path, "train")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no step is missing or twice"
    assert {row["samples"] - 8 * row["step"] for row in rows} == {0}, "the same global batches"
    assert (tmp_path / OUTPUT).exists()

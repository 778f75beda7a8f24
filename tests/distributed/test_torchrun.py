"""torchrun's elastic agent restarts a run that dies, at the same or another number of ranks. docs/clusters.md."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.runs import documented
from tests.distributed.test_ranks import losses
from tests.integration.test_launcher_ends import checkpoints, family, running, started, write_endless
from tests.support import free_port, read_metrics, run_command, write_project
from training.checkpoints.state import read_state

LIMITS = ["--max_steps", "60", "--save_every_steps", "5"]


def torchrun(words: list[str], *options: str) -> list[str]:
    *agent, script = documented("torchrun --standalone", {"8": "2"}, part="--save_every_steps")
    return [*agent, *options, script, *words]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return family(process)["rank"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_command(torchrun([*write_project(folder, zero_optimization={"stage": 1}), *LIMITS]))
    assert outcome.returncode == 0, outcome.stderr
    return losses(folder)


def test_a_killed_rank_is_restarted_and_the_losses_stay_the_same(undisturbed: list[float], tmp_path: Path) -> None:
    words = [*write_project(tmp_path, zero_optimization={"stage": 1}), *LIMITS]
    slow = ["-m", "tests.faults", '[{"kind": "slow_steps", "seconds": 0.1}]']  # until it is killed
    with running(torchrun(words, "--max-restarts", "2", *slow), tmp_path) as process:
        ranks_of(process)[-1].kill()
        assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    assert "  start        from /" in (tmp_path / "output.txt").read_text(), "it was restarted"
    assert losses(tmp_path) == undisturbed


def test_a_stop_request_saves_and_is_not_restarted(tmp_path: Path) -> None:
    """torchrun forwards SIGTERM to the ranks, waits until they have saved, and ends with code 1."""
    words = write_endless(tmp_path)
    with running(torchrun(words, "--max-restarts", "2"), tmp_path) as process:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 1
        assert not psutil.wait_procs(ranks, timeout=300)[1], "orphans"
    text = (tmp_path / "output.txt").read_text()
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {read_state(checkpoints(tmp_path).folder / newest).step} (SIGTERM)" in text


def test_a_mistake_is_reported_once_per_start(tmp_path: Path) -> None:
    """torchrun does not know exit codes: it restarts after a user's mistake too, which takes seconds."""
    words = [*write_project(tmp_path), "--no_such_flag"]
    outcome = run_command(torchrun(words, "--max-restarts", "1"))
    assert outcome.returncode == 1
    assert outcome.stderr.count("error: unknown flag '--no_such_flag'") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_lost_machine_leaves_a_smaller_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--nnodes 1:2: two agents with a rank each stand for two machines; the other one continues alone."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    words = [*write_project(tmp_path, zero_optimization={"stage": 1}), *LIMITS]
    agent = ["torchrun", "--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf", "last_call_timeout=8", "deepspeed_train.py"]
    other = tmp_path / "other"
    other.mkdir()
    with started([*agent, *words], other) as lost, running([*agent, *words], tmp_path) as kept:
        for process in [*ranks_of(lost), psutil.Process(lost.pid)]:
            process.kill()
        assert kept.wait(150) == 0, (tmp_path / "output.txt").read_text()
    assert "saved by 2 ranks, resharded for 1" in (tmp_path / "output.txt").read_text()
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == list(range(1, 61))

"""Runs on two machines: the commands of docs/clusters.md, and what to expect of them."""

import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.integration.test_launcher_ends import checkpoints
from tests.support import PROJECT
from training.checkpoints.state import read_state

OUTPUT = "output.txt"
Machines = tuple[Machine, Machine]


def write_hostfile(folder: Path, slots: int = 1) -> str:
    path = folder / "hostfile"
    path.write_text(f"worker-0 slots={slots}\nworker-1 slots={slots}\n")
    return str(path)


def documented(start: str, changes: Mapping[str, str]) -> list[str]:
    """The one command of docs/clusters.md that starts so, without flags of the script. `changes`: of its words."""
    page = (PROJECT / "docs" / "clusters.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"    {start}"))
    words = shlex.split(line)
    assert set(changes) <= set(words), f"not in the command: {set(changes) - set(words)}"
    if "deepspeed_train.py" in words:
        words = words[: words.index("deepspeed_train.py") + 1]
    return ["env", *(changes.get(word, word) for word in words)]


def deepspeed(folder: Path, words: Sequence[str], *options: str, slots: int = 1) -> list[str]:
    return ["deepspeed", "--hostfile", write_hostfile(folder, slots), *options, "deepspeed_train.py", *words]


def printed(folder: Path) -> str:
    return (folder / OUTPUT).read_text()


@contextmanager
def training(machine: Machine, command: Sequence[str], folder: Path, **env: str) -> Generator[Popen[str]]:
    """A command that has written a checkpoint."""
    with started(machine, command, folder / OUTPUT, **env) as process:
        before = checkpoints(folder).tags()
        wait_until(lambda: process.poll() is not None or checkpoints(folder).tags() != before, "a checkpoint")
        assert process.poll() is None, printed(folder)
        yield process


def run_to_end(machine: Machine, command: Sequence[str], folder: Path, **env: str) -> int:
    with started(machine, command, folder / OUTPUT, **env) as process:
        return process.wait(LAST_RESORT)


def run_everywhere(machines: Machines, commands: Sequence[Sequence[str]], folder: Path, **env: str) -> list[int]:
    """One command per machine at the same time; their exit codes."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(machine, command, folder / OUTPUT, **env))
            for machine, command in zip(machines, commands, strict=True)
        ]
        return [process.wait(LAST_RESORT) for process in processes]


def wait_for_no_rank(machines: Sequence[Machine]) -> None:
    """Wait until no rank runs on any of the machines, nor a process that DeepSpeed started for one."""

    def is_empty() -> bool:
        return not any("deepspeed" in word for machine in machines for p in machine.processes() for word in _words(p))

    wait_until(is_empty, "the end of all ranks")


def _words(process: object) -> list[str]:
    try:
        return process.cmdline()[:6]  # type: ignore[attr-defined, no-any-return]
    except Exception:  # it has ended
        return []


def saved_step(folder: Path) -> int:
    """The step of the newest valid checkpoint."""
    newest = checkpoints(folder).newest_valid()
    assert newest is not None
    return int(read_state(checkpoints(folder).folder / newest).step)

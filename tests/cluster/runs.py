"""Runs on two machines: the commands of docs/clusters.md, and what to expect of them."""

import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil

from common.console import console
from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.integration.test_launcher_ends import checkpoints
from tests.support import PROJECT
from training.checkpoints.paths import step_of
from training.checkpoints.state import read_state

OUTPUT = "output.txt"
FOR_SAVING = 180.0  # seconds for a step and a save, on a machine that is as busy as it can be
Machines = tuple[Machine, Machine]


def write_hostfile(folder: Path, slots: int = 1) -> str:
    path = folder / "hostfile"
    path.write_text(f"worker-0 slots={slots}\nworker-1 slots={slots}\n")
    return str(path)


def documented(start: str, changes: Mapping[str, str], part: str = "") -> list[str]:
    """The one command of docs/clusters.md that starts so and has this part, without flags of the script.

    `changes`: of its words.
    """
    page = (PROJECT / "docs" / "clusters.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"    {start}") and part in line)
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


def wait_for_no_rank(machines: Sequence[Machine], documented_seconds: float, with_launchers: bool = True) -> None:
    """Wait until no rank runs on any of the machines, nor a process that DeepSpeed started for one.

    It fails after much more than the seconds that docs/clusters.md promises: a busy machine takes longer to save.
    """

    def is_launched(process: psutil.Process) -> bool:
        return any("deepspeed" in word for word in find_words(process))

    def is_empty() -> bool:
        if not with_launchers:
            return not any(machine.ranks() for machine in machines)
        return not any(is_launched(process) for machine in machines for process in machine.processes())

    began = time.monotonic()
    wait_until(is_empty, "the end of all ranks", FOR_SAVING + 4 * documented_seconds)
    console.say(
        f"all ranks ended after {time.monotonic() - began:.1f} s; documented: {documented_seconds:.0f} s and a save"
    )


def find_words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()[:6]
    except psutil.Error:  # it has ended
        return []


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of a run that may still be training, and removes old ones meanwhile."""
    return max((step_of(tag) for tag in checkpoints(folder).tags()), default=0)


def saved_step(folder: Path) -> int:
    """The step of the newest valid checkpoint. Only after the end of the run: reading it all takes time."""
    newest = checkpoints(folder).newest_valid()
    assert newest is not None
    return int(read_state(checkpoints(folder).folder / newest).step)

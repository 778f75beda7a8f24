"""Launchers: how they number the processes they start, and whether those that started this one are still running.

Imports nothing that takes time.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class LauncherVariables(NamedTuple):
    """What a launcher calls the environment variables that torch's launchers set."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str

    def list_missing(self, environment: Mapping[str, str]) -> list[str]:
        return [name for name in self[1:] if name not in environment]


def _with_prefix(launcher: str, prefix: str) -> LauncherVariables:
    return LauncherVariables(launcher, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


SRUN = LauncherVariables("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
# The first of which all variables are set counts. srun is behind those that start their processes through it, and
# before the bare PMI variables that it sets itself.
KNOWN_LAUNCHERS = (
    _with_prefix("mpirun of Open MPI", "OMPI_COMM_WORLD_"),
    _with_prefix("mpirun of MVAPICH", "MV2_COMM_WORLD_"),
    LauncherVariables("mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN,
    _with_prefix("a PMI launcher", "PMI_"),
    _with_prefix("jsrun", "JSM_NAMESPACE_"),
)
# Set for each process by launchers that do not give all four numbers.
SIGNS = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")
NODE_LAUNCHER = "deepspeed.launcher.launch"  # the process that `deepspeed` starts on each machine
LAUNCHERS = (
    *(NODE_LAUNCHER, "deepspeed.launcher.runner"),
    *("torch.distributed.run", "torch.distributed.launch", "torchrun"),
)
PROCESSES = Path("/proc")
MAX_ANCESTORS = 6  # rank, helper, proxy of mpirun, mpirun, deepspeed; rank, deepspeed.launcher.launch, shell, sshd


def given_rank() -> str | None:
    """The rank that a launcher has given this process, as it writes it; None without a launcher."""
    names = ("RANK", *(known.rank for known in KNOWN_LAUNCHERS))
    return next((os.environ[name] for name in names if name in os.environ), None)


def is_launcher(command_line: Sequence[str]) -> bool:
    """Whether this is the command line of `deepspeed`, of the process it starts on each machine, or of torchrun."""
    return any(word.endswith(("/deepspeed", "/torchrun")) or word in LAUNCHERS for word in command_line[:4])


def find_deepspeed() -> str | None:
    """The `deepspeed` command of this environment, active or not, else the first on the PATH."""
    return shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Launcher:
    """The processes that this one must not outlive, as they are when this object is created.

    The process that assigned this one its rank is one, whatever it is. So is the `deepspeed` or `torchrun` above it,
    with all between. Behind pdsh, `deepspeed` is not above: there it is the sshd that ends with pdsh's connection,
    and, on the machine where `deepspeed` runs, the pdsh process with the same command and its parent. A rank there
    `sees_command`; if none does, nobody notices that `deepspeed` alone was killed.
    """

    def __init__(self) -> None:
        above = _list_ancestors(os.getpid())
        watched = 0 if given_rank() is None else 1
        watched = max([watched, *(place for place, process in enumerate(above) if place and _is_launcher(process))])
        words = _words_of(above[watched])
        is_behind_pdsh = NODE_LAUNCHER in words
        if is_behind_pdsh:
            names = [_words_of(process)[0] for process in above]
            watched = next((place for place in range(watched, len(above)) if names[place].startswith("sshd")), watched)
        self.chain = list(pairwise(above[: watched + 1]))
        self.sees_command = True
        if is_behind_pdsh:
            pdsh = _find_pdsh([word for word in words if word.startswith(("--world_info=", "--master_"))])
            self.chain += pdsh
            self.sees_command = bool(pdsh)

    def is_gone(self) -> bool:
        return any(_parent_of(child) != parent for child, parent in self.chain)


def _find_pdsh(run: Sequence[str]) -> list[tuple[int, int]]:
    """pdsh and its parent `deepspeed`, if they run on this machine. `run`: the words that identify the run."""
    processes = [int(path.name) for path in PROCESSES.iterdir() if path.name.isdecimal()]
    found = [process for process in processes if set(run) <= set(words := _words_of(process)) and "pdsh" in words[0]]
    return [(process, parent) for process in found if _is_launcher(parent := _parent_of(process))]


def _list_ancestors(process: int) -> list[int]:
    """The process, its parent, and so on, as far as a launcher can be above a rank."""
    above = [process]
    while len(above) < MAX_ANCESTORS and above[-1] > 1:
        above.append(_parent_of(above[-1]))
    return above


def _parent_of(process: int) -> int:
    try:
        # The command's name, which may contain anything, is in parentheses; after it come the state and the parent.
        return int((PROCESSES / f"{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _words_of(process: int) -> list[str]:
    """Its command line; sshd and others write a title there instead, as one word."""
    try:
        return (PROCESSES / f"{process}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return [""]


def _is_launcher(process: int) -> bool:
    return is_launcher(_words_of(process))

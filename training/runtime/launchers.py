"""Launchers: where `deepspeed` is installed, and whether the processes that started this one are still running."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from training.runtime.rank_variables import has_launcher

TORCH_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")


def is_launcher(command_line: Sequence[str]) -> bool:
    """Whether this is the command line of `deepspeed`, of the process it starts on each machine, or of torchrun."""
    return any(
        word == "deepspeed.launcher.launch" or word.endswith(("/deepspeed", "/torchrun")) or word in TORCH_LAUNCHERS
        for word in command_line[:4]
    )


def find_deepspeed() -> str | None:
    """The `deepspeed` command of this environment, active or not, else the first on the PATH."""
    return shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Launcher:
    """The processes above this one that it must not outlive, as they are when this object is created.

    The process that assigned this one its rank is one, whatever it is; so is the `deepspeed` command above it.
    """

    def __init__(self) -> None:
        parent = os.getppid()
        self.chain = [(os.getpid(), parent)] if has_launcher(os.environ) or _is_launcher(parent) else []
        if _is_launcher(parent) and _is_launcher(grandparent := _parent_of(parent)):
            self.chain.append((parent, grandparent))

    def is_gone(self) -> bool:
        return any(_parent_of(child) != parent for child, parent in self.chain)


def _parent_of(process: int) -> int:
    try:
        # The command's name, which may contain anything, is in parentheses; after it come the state and the parent.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_launcher(process: int) -> bool:
    try:
        return is_launcher(Path(f"/proc/{process}/cmdline").read_text().split("\0"))
    except (OSError, ValueError):
        return False

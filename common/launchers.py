"""Launchers: where `deepspeed` is, what started this process and whether it is still there; they die without a word."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from common.outcome import OUTCOME_VARIABLE

TORCH_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")


def is_launcher(command_line: Sequence[str]) -> bool:
    """Whether it is that of the `deepspeed` command, of what it starts on each machine, or of torchrun."""
    return any(
        word == "deepspeed.launcher.launch" or word.endswith(("/deepspeed", "/torchrun")) or word in TORCH_LAUNCHERS
        for word in command_line[:4]
    )


def find_deepspeed() -> str | None:
    """The `deepspeed` command of this environment, whether it is active or not, else whichever there is."""
    return shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Launcher:
    """The processes above this one that it must not outlive, as they are when this is made.

    Who gave this process its rank or waits for its outcome is one, whatever it is; and so is the `deepspeed` command
    above the launcher that it starts.
    """

    def __init__(self) -> None:
        parent = os.getppid()
        is_below = "RANK" in os.environ or OUTCOME_VARIABLE in os.environ or _is_launcher(parent)
        self.chain = [(os.getpid(), parent)] if is_below else []
        if _is_launcher(parent) and _is_launcher(grandparent := _parent_of(parent)):
            self.chain.append((parent, grandparent))

    def is_gone(self) -> bool:
        return any(_parent_of(child) != parent for child, parent in self.chain)


def _parent_of(process: int) -> int:
    try:
        # After the command's name, which is in parentheses and may hold anything: state, then the parent.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_launcher(process: int) -> bool:
    try:
        return is_launcher(Path(f"/proc/{process}/cmdline").read_text().split("\0"))
    except (OSError, ValueError):
        return False

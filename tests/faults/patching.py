"""How a fault is injected: functions of the product are wrapped."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rank_server import PIDS_VARIABLE

Fault = dict[str, Any]


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `action` with the same arguments right before `owner.name`."""
    original = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return original(*args, **options)

    setattr(owner, name, patched)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer_of(who: str) -> Callable[..., None]:
    """A function that kills this rank (`self`), every rank (`all`), or the process that started them (`launcher`)."""
    if who == "self":
        return die
    launcher, killed = os.getppid(), []

    def kill(*_: Any, **__: Any) -> None:
        if who == "all":
            ranks = json.loads(Path(os.environ[PIDS_VARIABLE]).read_text())
            for pid in sorted(ranks, key=lambda pid: pid == os.getpid()):  # itself last
                os.kill(pid, signal.SIGKILL)
        elif not killed:
            killed.append(launcher)
            os.kill(launcher, signal.SIGKILL)

    return kill


def announce(fault: Fault) -> None:
    """Write the fault's `file`, if it names one: the test waits for it."""
    if "file" in fault:
        Path(fault["file"]).write_text("now\n")


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)

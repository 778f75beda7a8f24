"""How a fault gets into a rank: functions of the product are wrapped, from outside."""

import os
import signal
from collections.abc import Callable
from typing import Any

Fault = dict[str, Any]


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Have `action` called with the same arguments right before `owner.name`."""
    original = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return original(*args, **options)

    setattr(owner, name, patched)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)

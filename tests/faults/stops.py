"""Stop requests at a chosen place."""

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.faults.patching import Fault, ask_to_stop, before


def _stop_at(fault: Fault) -> None:
    """A stop request right before the step of these samples."""
    from training import loop

    def ask(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            os.kill(os.getpid(), fault.get("signal", signal.SIGTERM))

    before(loop, "all_ranks_take_step", ask)


def _stop_in_accumulation(fault: Fault) -> None:
    """A stop request between the second and the third micro-step of the step of these samples."""
    from training.engine import build as engine

    original = engine.seed_of

    def seed_of(purpose: str, *numbers: int) -> int:
        if purpose == "dropout" and numbers[1] == fault["next_sample"] and numbers[2] == 1:
            ask_to_stop()
        return original(purpose, *numbers)

    engine.seed_of = seed_of


def _stop_in_commit(fault: Fault) -> None:
    """Asked to stop while the checkpoint of `step` is being committed, in the middle of the next step."""
    from training.checkpoints import writer as checkpoint

    before(checkpoint, "write_manifest", lambda *_: ask_to_stop())


def _stop_in_validation(_: Fault) -> None:
    from training import validation

    before(validation, "evaluation_batches", lambda *_, **__: ask_to_stop())


KINDS: dict[str, Callable[[Fault], None]] = {
    "stop_at": _stop_at,
    "stop_in_accumulation": _stop_in_accumulation,
    "stop_in_commit": _stop_in_commit,
    "stop_in_validation": _stop_in_validation,
}

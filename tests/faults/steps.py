"""Faults in a step or in a validation."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.faults.patching import Fault, announce, before, die


def _not_a_number(fault: Fault) -> None:
    """Spoil one gradient of this rank, or its loss (`of`), in the steps of the given samples."""
    from training import loop
    from training.engine import build as engine

    original = engine.all_ranks_take_step

    def all_ranks_take_step(target: Any, step: Any, *rest: Any) -> None:
        handle = None
        if step.next_sample in fault["next_samples"]:
            value = float(fault.get("value", "nan"))
            parameter = target.module.bert.embeddings.LayerNorm.weight
            if fault.get("of") == "loss":
                handle = target.module.register_forward_hook(partial(_add_to_loss, value))
            else:
                handle = parameter.register_hook(lambda gradient: gradient * value)
        try:
            original(target, step, *rest)
        finally:
            if handle is not None:
                handle.remove()

    loop.all_ranks_take_step = all_ranks_take_step


def _add_to_loss(value: float, module: Any, _arguments: Any, loss: torch.Tensor) -> torch.Tensor:
    """The gradient stays finite, like that of an infinite cross entropy."""
    module.details = module.details._replace(masked_lm_loss_sum=module.details.masked_lm_loss_sum + value)
    return loss + value


def _loss_is_not_a_number(fault: Fault) -> None:
    """Sums that are NaN, as a forward pass that overflows in fp16 leaves them, in the step of these samples."""
    from training import loop

    original = loop.all_ranks_take_step

    def all_ranks_take_step(target: Any, step: Any, tally: Any, *rest: Any) -> None:
        original(target, step, tally, *rest)
        if step.next_sample in fault["next_samples"]:
            tally.sums = tally.sums * float("nan")

    loop.all_ranks_take_step = all_ranks_take_step


def _spoil_weights(fault: Fault) -> None:
    """Spoil the weights before the step of these samples, so that the loss jumps until a rollback.

    With `always` it happens at that step number every time, whatever its samples are.
    """
    from deepspeed.runtime.zero import GatheredParameters

    from training import loop

    done: list[int] = []

    def spoil(target: Any, step: Any, *_: Any) -> None:
        is_due = step.next_sample == fault["next_sample"] and not done
        if fault.get("always"):
            is_due = target.global_steps - target.skipped_steps == fault["next_sample"] // 8 - 1
        if is_due:
            done.append(1)
            weight = target.module.bert.embeddings.word_embeddings.weight
            with torch.no_grad(), GatheredParameters([weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")):
                weight.mul_(-30.0)

    before(loop, "all_ranks_take_step", spoil)


def _die_in_rollback(fault: Fault) -> None:
    """Kill the rank right before its `number`th rollback."""
    from training.faults.spikes import SpikeResponse

    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == fault["number"]:
            die()

    before(SpikeResponse, "all_ranks_roll_back", count)


def _hang(fault: Fault) -> None:
    """Hang at the step of these samples: asleep, or with the whole process stopped."""
    from training import loop

    def hang(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            announce(fault)
            if fault.get("how") == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)

    before(loop, "all_ranks_take_step", hang)


def _slow_steps(fault: Fault) -> None:
    """Leave time for signals between two steps."""
    from training import loop

    before(loop, "all_ranks_take_step", lambda *_: time.sleep(fault["seconds"]))


def _slow_clock(fault: Fault) -> None:
    """A rank whose timers show `seconds` more for each forward pass, backward pass or product of a probe (`of`).

    So one rank is slower than another by far more than what a busy machine adds to either.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    from nvidia.modelingpreln import BertForPreTrainingPreLN
    from training.metrics import flops
    from training.metrics.timing import SectionTimer

    places = {
        "forward": (BertForPreTrainingPreLN, "forward"),
        "backward": (DeepSpeedEngine, "backward"),
        "product": (flops, "linear"),
    }
    added: list[float] = []
    for name in fault["of"]:
        before(*places[name], lambda *_, **__: added.append(fault["seconds"]))

    def read_clock() -> float:
        return time.perf_counter() + sum(added)

    for timer in (SectionTimer, flops.MatmulProbe):
        timer.__init__.__defaults__ = (*timer.__init__.__defaults__[:-1], read_clock)  # type: ignore[index, misc]


def _long_sequences(_: Fault) -> None:
    """A rank for which all sequences count as long, so that it skips queries of the last block that nothing reads."""
    from nvidia.attention import grouped

    grouped._MIN_SKIPPED = 0


def _worse_validation(_: Fault) -> None:
    from training.validation import Validator

    original = Validator.all_ranks_measure

    def measure(self: Validator) -> dict[str, float] | None:
        figures = original(self)
        return None if figures is None else {**figures, "mlm_loss": figures["mlm_loss"] + 9.0}

    Validator.all_ranks_measure = measure  # type: ignore[method-assign]


KINDS: dict[str, Callable[[Fault], None]] = {
    "not_a_number": _not_a_number,
    "loss_is_not_a_number": _loss_is_not_a_number,
    "spoil_weights": _spoil_weights,
    "die_in_rollback": _die_in_rollback,
    "hang": _hang,
    "slow_steps": _slow_steps,
    "slow_clock": _slow_clock,
    "long_sequences": _long_sequences,
    "worse_validation": _worse_validation,
}

"""--dry_run: build everything, take a few steps on the first batch, report the cost of the run; write nothing."""

import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch

from common.console import console
from common.words import counted, format_count
from training.build import Run
from training.clock import Clock
from training.engine.build import all_ranks_take_step, set_batch
from training.inputs.datasets import build_stream
from training.loop_parts import all_ranks_build_window
from training.metrics.window import Tally, peak_memory_gib
from training.plan.horizon import look_ahead
from training.runtime import collectives

TIMED_STEPS = 2


def all_ranks_dry_run(run: Run) -> None:
    """Take steps as a run does, on its first batch, with a learning rate of zero."""
    window = all_ranks_build_window(run)
    for group in run.engine.optimizer.param_groups:
        group["lr"] = 0.0
    segment = run.clock.horizon.plan.at(run.progress.samples)
    set_batch(run.engine, segment)
    stream = build_stream(
        run.datasets.training, run.rank_info, run.settings.flags.training.seed, run.settings.masking, segment
    )
    with closing(stream.steps(run.progress.samples)) as steps:  # type: ignore[type-var]
        batches = collectives.all_ranks_read(lambda: next(steps))
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        began, tally = time.perf_counter(), Tally()
        run.grad_norm.note_scale()
        all_ranks_take_step(run.engine, batches, tally, run.timer, run.progress.state.seed, run.device)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        window.count(run.progress.step, tally, batches, run.settings.model_config.num_hidden_layers)
    figures = window.all_ranks_close().figures
    seconds_per_step = fastest_step(seconds)
    speed_up = figures["seconds_per_step"] / seconds_per_step  # over the mean step of the window
    console.say("dry run: nothing was written")
    console.say(f"  memory  {describe_memory(run.engine, run.device)}")
    console.say(
        f"  speed   {seconds_per_step:.2f} s/step, {figures['tokens_per_second'] * speed_up:,.0f} tokens/s, "
        f"matmul {figures['matmul_share'] * speed_up:.0%}"
    )
    show_rest(run.clock, seconds_per_step / segment.accumulation)


def fastest_step(seconds: list[float]) -> float:
    """The fastest step but for the first, which pays for allocations; others may have been disturbed."""
    return min(seconds[1:])


def show_rest(clock: Clock, seconds_per_micro_step: float) -> None:
    """Show steps, time and tokens until the end; with a time budget those that fit into the rest of it."""
    outlook = look_ahead(clock.horizon, clock.progress.step, clock.progress.samples)
    seconds = clock.seconds_to_last_step(seconds_per_micro_step)
    share = min(1.0, clock.budget.left() / seconds) if clock.has_budget and seconds > 0 else 1.0
    console.say(
        f"  left    {'about ' if share < 1 else ''}{counted(round(share * outlook.steps_left), 'step')}, "
        f"{timedelta(seconds=round(share * seconds))} (hours:minutes:seconds), about "
        f"{format_count(share * outlook.tokens_left)} tokens"
    )
    early_end = clock.find_early_end(seconds_per_micro_step)
    if early_end is not None:
        console.say(f"note: {early_end}")


def describe_memory(engine: Any, device: torch.device) -> str:
    """Peak memory of this rank, and its parts."""
    parts, peak = memory_by_part(engine), peak_memory_gib(device)
    parts["activations and other"] = max(0.0, peak - sum(parts.values()))
    listed = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    return f"{peak:.2f} GiB per rank at its peak: {listed}"


def memory_by_part(engine: Any) -> dict[str, float]:
    """GiB of this rank's parameters, gradients and optimizer state."""
    parameters = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    own = {id(p) for p in engine.module.parameters()}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = [
        tensor for values in inner.state.values() for tensor in values.values() if isinstance(tensor, torch.Tensor)
    ]
    masters = [p for group in inner.param_groups for p in group["params"] if id(p) not in own]
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    gradients = trained if engine.zero_optimization_stage() < 2 else masters
    return {
        "parameters": _gib(parameters),
        "gradients": _gib(gradients),
        "optimizer": _gib(state) + _gib(masters),
    }


def _gib(tensors: list[torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 2**30

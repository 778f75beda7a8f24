"""--dry_run: build everything, take a few steps on the first batch, say what the run would cost; write nothing."""

import time
from contextlib import closing
from typing import Any

import torch

from common.console import console
from training.build import Run
from training.engine.build import set_batch, take_step
from training.metrics.formatting import format_hours
from training.metrics.window import MetricsWindow, peak_memory_gib, seconds_to_last_step
from training.plan.outlook import find_early_end, format_count, look_ahead
from training.runtime import collectives

TIMED_STEPS = 2


def dry_run(run: Run) -> None:
    """The same steps a run takes, on its first batch, with the learning rate at zero."""
    window = MetricsWindow(run)
    for group in run.engine.optimizer.param_groups:
        group["lr"] = 0.0
    set_batch(run.engine, run.plan.at(run.state.samples))
    with closing(run.stream.steps(run.state.samples)) as steps:  # type: ignore[type-var]
        batches = collectives.all_ranks_read(lambda: next(steps))
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        began = time.perf_counter()
        window.norm.note_scale()
        take_step(run.engine, batches, window.tally, window.phases, run.state.seed, run.device)
        window.count(batches)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    report(run, window, seconds_of_a_step(seconds))


def seconds_of_a_step(measured: list[float]) -> float:
    """Without the first, which pays for allocations, and without disturbances."""
    return min(measured[1:])


def report(run: Run, window: MetricsWindow, seconds: float) -> None:
    sums = window.tally.take({"flops": window.flops})
    tokens, flops = sums["num_tokens"] / window.num_steps, sums["flops"] / window.num_steps
    parts = memory_by_part(run.engine)
    peak = peak_memory_gib(run.device)
    rest = max(0.0, peak - sum(parts.values()))
    listed = ", ".join(f"{name} {size:.2f}" for name, size in {**parts, "activations and the rest": rest}.items())
    console.say("dry run: nothing was written")
    console.say(f"  memory    {peak:.2f} GiB a rank at its peak: {listed}")
    console.say(
        f"  speed     {seconds:.2f} s a step, {tokens / seconds:,.0f} tokens/s, "
        f"{flops / seconds / window.matmul_speed:.0%} of the machine's matmul speed"
    )
    say_what_is_to_go(run, seconds / run.plan.at(run.state.samples).accumulation)


def say_what_is_to_go(run: Run, seconds_per_micro_step: float) -> None:
    """Steps, time and tokens to the end; with a time budget those that fit into what is left of it."""
    outlook = look_ahead(run.horizon, run.state.step, run.state.samples)
    seconds = seconds_to_last_step(run, seconds_per_micro_step)
    share = 1.0
    if run.budget.total is not None and seconds > 0:
        share = min(1.0, run.budget.left() / seconds)
    steps, tokens = share * outlook.steps_left, format_count(share * outlook.tokens_left)
    console.say(
        f"  to go     {'about ' if share < 1 else ''}{steps:,.0f} steps, {format_hours(share * seconds)} "
        f"(hours:minutes:seconds), about {tokens} tokens"
    )
    early = find_early_end(run.horizon, run.schedule, run.budget, seconds)
    if early is not None:
        console.say(f"note: {early}")


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

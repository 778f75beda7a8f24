"""The training loop."""

import math
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from common.console import console
from data.loader import StepBatches
from training.engine import take_step
from training.metrics import Stopwatch, Tally, say_validation, summarize, train_line
from training.optimizer import set_learning_rate
from training.run import Run
from training.validation import validate


def train(run: Run) -> None:
    """Step until the horizon; report, validate and save on the way; leave a checkpoint at the end."""
    if run.horizon.is_finished(run.state.step, run.state.samples):
        console.say(f"finished already, at step {run.state.step}: nothing to do")
        return
    window = Window(run)
    progress = console.progress(total=run.horizon.last_step(), initial=run.state.step, unit="step", dynamic_ncols=True)
    with closing(read_steps(run, window.watch)) as steps:
        for batches in steps:
            epoch = run.horizon.epoch_of(run.state.samples)
            set_learning_rate(run.engine.optimizer, run.schedule.rate(run.state.step))
            take_step(run.engine, batches, window.tally, run.state.seed, run.device)
            advance(run, batches)
            window.num_steps += 1
            progress.update(run.state.step - progress.n)

            is_finished = run.horizon.is_finished(run.state.step, run.state.samples)
            is_validation = should_validate(run, is_finished)
            is_save = should_save(run, epoch, is_finished)
            if run.state.step % run.settings.flags.print_steps == 0 or is_validation or is_save:
                window.report()
            if is_validation:
                report_validation(run)
            if is_save:
                save(run)
            if is_finished:
                break
            if is_validation or is_save:
                window.watch.lap()  # throughput is that of training alone
    progress.close()
    run.sinks.close()


def read_steps(run: Run, watch: Stopwatch) -> Generator[StepBatches]:
    """Steps from the run's cursor on, jumping over the rest of an epoch that has had its steps; times the waiting."""
    while True:
        cursor = run.state.samples
        with closing(run.stream.steps(cursor)) as steps:  # type: ignore[type-var]
            while run.state.samples == cursor:
                began = time.perf_counter()
                batches = next(steps)
                watch.data_wait += time.perf_counter() - began
                yield batches
                cursor = batches.next_sample


def advance(run: Run, batches: StepBatches) -> None:
    """Move the cursor past `batches`. A step that fp16 skipped consumed its rows but is not a step."""
    run.state = replace(
        run.state,
        step=run.engine.global_steps - run.engine.skipped_steps,
        samples=run.horizon.next_sample(batches.next_sample),
    )


class Window:
    """The steps since the last report."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tally = Tally()
        self.watch = Stopwatch()
        self.num_steps = 0

    def report(self) -> None:
        run = self.run
        sums = self.tally.take()
        elapsed, waited = self.watch.lap()
        run.state = replace(run.state, tokens=run.state.tokens + int(sums["num_tokens"]))
        norm = run.engine.get_global_grad_norm()
        figures = {
            **summarize(sums),
            "learning_rate": run.schedule.rate(run.state.step - 1),
            "grad_norm": math.nan if norm is None else float(norm),
            "epoch": run.state.samples / run.horizon.num_rows,
            "tokens": float(run.state.tokens),
            "tokens_per_second": sums["num_tokens"] / elapsed,
            "seconds_per_step": elapsed / self.num_steps,
            "data_wait_share": waited / elapsed,
            "skipped_steps": float(run.engine.skipped_steps),
        }
        if run.settings.precision == "fp16":
            figures["loss_scale"] = float(run.engine.optimizer.cur_scale)
        console.say(train_line(run.state.step, run.horizon.last_step(), figures))
        run.sinks.record("train", run.state.step, run.state.samples, figures)
        self.num_steps = 0


def should_validate(run: Run, is_finished: bool) -> bool:
    every = run.settings.flags.validate_every_steps
    if run.validation is None:
        return False
    return is_finished or (every is not None and run.state.step % every == 0)


def should_save(run: Run, epoch: int, is_finished: bool) -> bool:
    flags = run.settings.flags
    if is_finished or (flags.save_every_steps is not None and run.state.step % flags.save_every_steps == 0):
        return True
    ended_epoch = run.horizon.epoch_of(run.state.samples) > epoch
    return ended_epoch and (flags.ckpt_to_save is None or epoch in flags.ckpt_to_save)


def report_validation(run: Run) -> None:
    assert run.validation is not None
    figures = validate(run.engine, run.validation, run.place, run.settings.deepspeed.batch.micro, run.device)
    best = run.state.best_validation_loss
    run.state = replace(
        run.state, best_validation_loss=figures["mlm_loss"] if best is None else min(best, figures["mlm_loss"])
    )
    say_validation(run.state.step, figures)
    run.sinks.record("validation", run.state.step, run.state.samples, figures)


def save(run: Run) -> None:
    path = run.checkpoints.save(run.engine, run.state, run.settings.sources, run.settings.flags.keep_last)
    console.say(f"checkpoint: {path}")

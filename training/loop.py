"""The training loop."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from common.console import console
from data.loader import StepBatches
from nvidia.layer_drop import keep_theta
from training import distributed
from training.checkpoint import Best, tag_of
from training.display import live_text, say_validation
from training.engine import seed_of, take_step
from training.optimizer import set_learning_rate
from training.run import Run, build_stream
from training.samples import Samples
from training.timing import Phases
from training.validation import validate
from training.window import Window, seconds_left


def train(run: Run) -> None:
    """Step until the horizon; report, validate and save on the way; leave a checkpoint at the end."""
    if run.horizon.is_finished(run.state.step, run.state.samples) or run.budget.is_over(run.state.seconds, 0.0):
        console.say(f"finished already, at step {run.state.step}: nothing to do")
        return
    window = Window(run)
    samples = Samples(run.settings.tokenizer, run.settings.flags.max_seq_length)
    total = None if run.budget.total is not None else run.horizon.last_step()
    progress = console.progress(total=total, initial=run.state.step, unit="step", dynamic_ncols=True)
    with closing(read_steps(run, window.phases)) as steps:
        for batches in steps:
            epoch = run.horizon.epoch_of(run.state.samples)
            window.rate = current_rate(run)
            set_learning_rate(run.engine.optimizer, window.rate)
            drop_layers(run)
            window.norm.note_scale()
            take_step(run.engine, batches, window.tally, window.phases, run.state.seed, run.device)
            window.count(batches)
            advance(run, batches)

            is_finished = should_stop(run, window)
            is_validation = should_validate(run, is_finished)
            is_save = should_save(run, epoch, is_finished)
            if run.state.step % run.settings.flags.print_steps == 0 or is_validation or is_save:
                window.report()
            best = None
            if is_validation:
                with window.phases.measure("validation"):
                    best = report_validation(run, is_save)
                with window.phases.measure("logging"):
                    show_model(run, samples)
            if is_save or best is not None:
                with window.phases.measure("checkpoint"):
                    save(run, best)
            show_progress(progress, run, window)
            if is_finished:
                break
    progress.close()
    run.sinks.close(hyperparameters(run))


def read_steps(run: Run, phases: Phases) -> Generator[StepBatches]:
    """Steps from the run's cursor on, of the size that the plan gives there; times the waiting.

    Jumps over the rest of an epoch that has had its steps.
    """
    while True:
        cursor = run.state.samples
        accumulation = run.batches.accumulation_at(cursor)
        if accumulation != run.stream.gradient_accumulation_steps:
            run.stream = build_stream(run.settings, run.place, run.stream.dataset, accumulation)
        run.engine.set_train_batch_size(run.batches.rows_at(cursor))
        with closing(run.stream.steps(cursor)) as steps:  # type: ignore[type-var]
            while run.state.samples == cursor and run.batches.accumulation_at(cursor) == accumulation:
                with phases.measure("data_wait"):
                    batches = next(steps)
                yield batches
                cursor = batches.next_sample


def drop_layers(run: Run) -> None:
    """--progressive_layer_drop: choose the blocks that this step leaves out, the same on every rank and on resume."""
    if not run.settings.flags.progressive_layer_drop:
        return
    block, step = run.settings.deepspeed.layer_drop, run.state.step
    theta = keep_theta(step, block.theta, block.gamma)
    run.engine.module.set_layer_drop(theta, seed_of("layer drop", run.state.seed, step))


def current_rate(run: Run) -> float:
    """The next step's rate: by the steps taken, or with a time budget by the share of it that is over."""
    if run.budget.total is None:
        return run.schedule.rate(run.state.step)
    done = run.budget.progress(run.state.seconds) * run.schedule.total_steps
    return run.schedule.rate(run.schedule.origin + done)


def should_stop(run: Run, window: Window) -> bool:
    """Whether the step just taken was the last. With a time budget rank 0's clock decides for all."""
    if run.budget.total is not None and is_time_over(run, window):
        return True
    return run.horizon.is_finished(run.state.step, run.state.samples)


def is_time_over(run: Run, window: Window) -> bool:
    """Rank 0's clock and verdict, on every rank: each has its own, and they must not part."""
    used = run.budget.used()
    is_over = run.budget.is_over(used, window.figures.get("seconds_per_step", 0.0))
    told = torch.tensor([used, float(is_over)], dtype=torch.float64, device=run.device)
    seconds, verdict = distributed.sum_over_ranks(told if run.place.is_main else torch.zeros_like(told)).tolist()
    run.state = replace(run.state, seconds=seconds)
    run.budget.is_ended = bool(verdict)
    return run.budget.is_ended


def advance(run: Run, batches: StepBatches) -> None:
    """Move the cursor past `batches`. A step that fp16 skipped consumed its rows but is not a step."""
    run.state = replace(
        run.state,
        step=run.engine.global_steps - run.engine.skipped_steps,
        samples=run.horizon.next_sample(batches.next_sample),
    )


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


def steps_to_save(run: Run) -> int:
    """Steps from here to the next checkpoint, when nothing is skipped."""
    flags, step = run.settings.flags, run.state.step
    candidates = [run.horizon.last_step() - step]
    if flags.save_every_steps is not None:
        candidates.append(flags.save_every_steps - step % flags.save_every_steps)
    epoch = run.horizon.epoch_of(run.state.samples)
    if flags.ckpt_to_save is None or epoch in flags.ckpt_to_save:
        rows_left = (epoch + 1) * run.horizon.num_rows - run.state.samples
        candidates.append(-(-rows_left // run.batches.rows_at(run.state.samples)))
    return min(candidates)


def show_progress(progress: tqdm, run: Run, window: Window) -> None:
    if progress.disable:
        return
    if window.figures:
        pace, epoch = window.figures["seconds_per_step"], run.state.samples / run.horizon.num_rows
        left = seconds_left(run, pace)
        text = live_text(epoch, window.figures, left, min(left, steps_to_save(run) * pace))
        progress.set_postfix_str(text, refresh=False)
    progress.update(run.state.step - progress.n)


def report_validation(run: Run, is_save: bool) -> Best | None:
    """Validate; what to note in the checkpoint that --keep_best asks for when this is the lowest loss so far."""
    assert run.validation is not None
    began = time.perf_counter()
    figures = validate(run.engine, run.validation, run.place, run.settings.deepspeed.batch.micro, run.device)
    run.budget.note_pause(time.perf_counter() - began)
    loss, lowest = figures["mlm_loss"], run.state.best_validation_loss
    is_best = lowest is None or loss < lowest
    if is_best:
        run.state = replace(run.state, best_validation_loss=loss)
    say_validation(run.state.step, figures)
    run.sinks.record("validation", run.state.step, run.state.samples, figures)
    if not (is_best and run.settings.flags.keep_best):
        return None
    return Best(tag_of(run.state), loss, is_only_best=not is_save)


def show_model(run: Run, samples: Samples) -> None:
    """Guesses for fixed sentences, and histograms when asked for. Stage 3 keeps no whole model to look at."""
    if not run.place.is_main or run.settings.deepspeed.zero_stage == 3:
        return
    table = samples.table(run.engine.module, run.device)
    if table is not None:
        run.sinks.text("guesses", table, run.state.step)
    if run.settings.flags.log_histograms:
        run.sinks.histograms(run.engine.module, run.state.step)


def hyperparameters(run: Run) -> dict[str, Any]:
    """What TensorBoard's table of runs shows of a run."""
    settings = run.settings
    optimizer = settings.deepspeed.content.get("optimizer", {})
    return {
        **settings.training.model_dump(),
        **{key: value for key, value in settings.model_config.to_dict().items() if value is not None},
        "batch_size": settings.deepspeed.batch.total,
        "optimizer": optimizer.get("type", "AdamW"),
        "lr_schedule": settings.flags.lr_schedule,
        "max_seq_length": settings.flags.max_seq_length,
        "precision": settings.precision,
        "seed": settings.flags.seed,
        "is_preln": settings.flags.preln,
    }


def save(run: Run, best: Best | None) -> None:
    began = time.perf_counter()
    # Rank 0's clock is the one that is saved; in run.state it would part the ranks.
    state = replace(run.state, seconds=run.budget.used())
    path = run.checkpoints.save(run.engine, state, run.settings.sources, run.settings.flags.keep_last, best)
    run.budget.note_pause(time.perf_counter() - began)
    console.say(f"checkpoint: {path}" + (" (the best so far)" if best else ""))

"""The training loop."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from common.console import console
from data.loader import StepBatches
from nvidia.layer_drop import keep_theta
from training.display import live_text, say_validation
from training.engine import seed_of, take_step
from training.optimizer import set_learning_rate
from training.run import Run
from training.samples import Samples
from training.timing import Phases
from training.validation import validate
from training.window import Window


def train(run: Run) -> None:
    """Step until the horizon; report, validate and save on the way; leave a checkpoint at the end."""
    if run.horizon.is_finished(run.state.step, run.state.samples):
        console.say(f"finished already, at step {run.state.step}: nothing to do")
        return
    window = Window(run)
    samples = Samples(run.settings.tokenizer, run.settings.flags.max_seq_length)
    progress = console.progress(total=run.horizon.last_step(), initial=run.state.step, unit="step", dynamic_ncols=True)
    with closing(read_steps(run, window.phases)) as steps:
        for batches in steps:
            epoch = run.horizon.epoch_of(run.state.samples)
            set_learning_rate(run.engine.optimizer, run.schedule.rate(run.state.step))
            drop_layers(run)
            window.norm.note_scale()
            take_step(run.engine, batches, window.tally, window.phases, run.state.seed, run.device)
            window.count(batches)
            advance(run, batches)

            is_finished = run.horizon.is_finished(run.state.step, run.state.samples)
            is_validation = should_validate(run, is_finished)
            is_save = should_save(run, epoch, is_finished)
            if run.state.step % run.settings.flags.print_steps == 0 or is_validation or is_save:
                window.report()
            if is_validation:
                with window.phases.measure("validation"):
                    report_validation(run)
                with window.phases.measure("logging"):
                    show_model(run, samples)
            if is_save:
                with window.phases.measure("checkpoint"):
                    save(run)
            show_progress(progress, run, window)
            if is_finished:
                break
    progress.close()
    run.sinks.close(hyperparameters(run))


def read_steps(run: Run, phases: Phases) -> Generator[StepBatches]:
    """Steps from the run's cursor on, jumping over the rest of an epoch that has had its steps; times the waiting."""
    while True:
        cursor = run.state.samples
        with closing(run.stream.steps(cursor)) as steps:  # type: ignore[type-var]
            while run.state.samples == cursor:
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
        candidates.append(-(-rows_left // run.horizon.batch_size))
    return min(candidates)


def show_progress(progress: tqdm, run: Run, window: Window) -> None:
    if progress.disable:
        return
    if window.figures:
        pace, epoch = window.figures["seconds_per_step"], run.state.samples / run.horizon.num_rows
        left = run.horizon.last_step() - run.state.step
        text = live_text(epoch, window.figures, left * pace, steps_to_save(run) * pace)
        progress.set_postfix_str(text, refresh=False)
    progress.update(run.state.step - progress.n)


def report_validation(run: Run) -> None:
    assert run.validation is not None
    figures = validate(run.engine, run.validation, run.place, run.settings.deepspeed.batch.micro, run.device)
    best = run.state.best_validation_loss
    run.state = replace(
        run.state, best_validation_loss=figures["mlm_loss"] if best is None else min(best, figures["mlm_loss"])
    )
    say_validation(run.state.step, figures)
    run.sinks.record("validation", run.state.step, run.state.samples, figures)


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


def save(run: Run) -> None:
    path = run.checkpoints.save(run.engine, run.state, run.settings.sources, run.settings.flags.keep_last)
    console.say(f"checkpoint: {path}")

"""The training loop."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from common.console import console
from common.errors import UserError
from data.stream.loader import StepBatches
from nvidia.layer_drop import keep_theta
from training.build import Run, load_engine
from training.checkpoints.match import ResumePoint
from training.checkpoints.paths import SKIPS
from training.checkpoints.retention import Best
from training.checkpoints.saving import Saver
from training.checkpoints.state import read_state, tag_of
from training.checkpoints.writer import SaveFailed
from training.engine.build import seed_of, set_batch, take_step
from training.export.hugging_face import all_ranks_export
from training.faults.guard import BadSteps, Spikes, describe_spike, guard_engine
from training.faults.skips import Skips, count_rollbacks, next_unskipped, note_skips
from training.guesses import Samples
from training.inputs.streams import build_stream
from training.metrics.formatting import first_live_text, live_text, say_validation
from training.metrics.timing import SectionTimer
from training.metrics.window import MetricsWindow, seconds_left
from training.optimizers.build import set_learning_rate
from training.runtime import collectives
from training.runtime.watchdog import Watchdog
from training.validation import validate, validation_rows

MAX_ROLLBACKS = 3  # to one checkpoint: then it is not the batches that make the loss jump


def train(run: Run, watchdog: Watchdog) -> bool:
    """Step until the horizon; report, validate and save on the way. False: stopped on request, with all saved."""

    def note(phase: str) -> None:
        watchdog.note(phase, run.state.step)

    if run.horizon.is_finished(run.state.step, run.state.samples) or run.budget.is_over(run.state.seconds, 0.0):
        console.say(f"finished already, at step {run.state.step}: nothing to do")
        if not make_up_for_the_end(run, note):
            console.say("stopped during the last validation; the same command makes up for it")
            return False
    else:
        loop = Loop(run)
        loop.window.phases.on_begin = note
        if not loop.go():
            run.sinks.close()
            return False
        run.sinks.finish(hyperparameters(run), run.state)
    export_dir = run.settings.flags.export_dir
    if export_dir is not None:
        note("export")
        checkpoint = run.checkpoints.folder / tag_of(run.state)
        all_ranks_export(checkpoint, export_dir, run.settings.tokenizer, run.settings.runs / "metrics.jsonl")
    return True


def make_up_for_the_end(run: Run, note: Callable[[str], None]) -> bool:
    """What a stop in the last validation left out: it, the mark of the best, the guesses, the table of runs.

    False: stopped on request again.
    """
    step = run.state.step
    has_ended, has_validation = collectives.all_ranks_from_main(
        lambda: (run.sinks.has("end", step), run.sinks.has("validation", step))
    )
    if run.validation is not None and not has_validation:
        phases = SectionTimer(run.device)
        phases.on_begin = note
        best = report_validation(run, is_save=True, phases=phases)
        if best is not None:
            Saver(run).save(best)  # the checkpoint is there, and is only marked
    if run.stop.all_ranks_agreed():
        return False
    if not has_ended:
        show_model(run, Samples(run.settings.tokenizer, run.settings.flags.max_seq_length))
        run.sinks.finish(hyperparameters(run), run.state)
    return True


class Loop:
    """The parts that take steps, look at them, and save."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.window = MetricsWindow(run)
        self.saver = Saver(run)
        self.bad_steps = BadSteps(run)
        self.spikes = Spikes()
        self.is_read_ahead = False  # whether every rank had its next step when the last one ended
        self.samples = Samples(run.settings.tokenizer, run.settings.flags.max_seq_length)
        total = None if run.budget.total is not None else run.horizon.last_step()
        self.progress = console.progress(total=total, initial=run.state.step, unit="step", dynamic_ncols=True)

    def go(self) -> bool:
        """Whether the end was reached; otherwise all ranks have agreed to stop."""
        run = self.run
        is_finished = is_stopped = run.stop.all_ranks_agreed()
        with closing(read_steps(run, self.window.phases)) as steps:
            while not (is_finished or is_stopped):
                epoch = run.horizon.epoch_of(run.state.samples)
                step = run.state.step
                is_taken = pass_skips(run) or self.take(self.read(steps))
                is_finished = is_taken and should_stop(run, self.window)
                wants_stop = run.stop.reason is not None or not is_taken
                is_stopped, is_overdue, is_unread, is_behind = collectives.all_ranks_any(
                    wants_stop, self.saver.is_overdue(), run.stream.failure is not None, not run.stream.has_next
                )
                self.is_read_ahead = not is_behind
                if is_unread and not is_finished:
                    self.leave_unread(run.stream.failure)
                if is_taken and not (is_stopped and not is_finished):
                    is_back = self.look_after(epoch, is_finished, is_overdue, is_new=run.state.step > step)
                    is_finished = is_finished and not is_back
        self.progress.close()
        if is_finished and not run.stop.agreed:
            return True
        self.leave_early()
        return False

    def read(self, steps: Iterator[StepBatches]) -> StepBatches:
        """The next step's batches. Where a rank may still fail to read them, all wait for its word."""
        stream, batches, failure = self.run.stream, None, None
        try:
            batches = next(steps)
        except Exception as error:  # raised below, after the others have been told
            failure = error
        # A stream that has begun just now has read nothing ahead. It begins on all ranks at the same step.
        is_certain = self.is_read_ahead and self.run.stream is stream
        if not is_certain and collectives.all_ranks_any(failure is not None)[0]:
            self.leave_unread(failure)
        assert batches is not None, failure
        return batches

    def take(self, batches: StepBatches) -> bool:
        """One optimizer step, and the cursor moved past it. False: given up half-way because of a request to stop."""
        run, window = self.run, self.window
        window.rate = current_rate(run)
        set_learning_rate(run.engine.optimizer, window.rate)
        drop_layers(run)
        window.norm.note_scale()
        sums, skipped = window.tally.sums, run.engine.skipped_steps
        is_taken = take_step(
            run.engine, batches, window.tally, window.phases, run.state.seed, run.device, run.stop.all_ranks_agreed
        )
        if not is_taken:
            window.tally.sums = sums
            return False
        try:
            self.bad_steps.check(batches)
        except UserError:
            window.tally.sums = sums
            self.save_before_bad_steps()
            raise
        advance(run, batches)
        if run.engine.skipped_steps > skipped:
            window.tally.sums = sums  # not a number, perhaps; it would be that for the whole window
        else:
            window.count(batches)
        return True

    def save_before_bad_steps(self) -> None:
        """None of them was applied, so the weights are good; the cursor goes back to where they began."""
        self.run.state = replace(self.run.state, samples=self.bad_steps.first_sample)
        self.save_now()

    def look_after(self, epoch: int, is_finished: bool, is_overdue: bool, is_new: bool) -> bool:
        """After a step: report, validate and save what is due. True: a spike took the run back to an earlier step.

        `is_new` False: the step was skipped, and nothing is due.
        """
        if not (is_new or is_finished or is_overdue):
            return False
        run, window = self.run, self.window
        is_validation = should_validate(run, is_finished)
        is_save = is_overdue or self.saver.is_due(epoch, is_finished)
        is_report = run.state.step % run.settings.flags.print_steps == 0 or is_validation or is_save
        if is_report and window.num_steps:
            window.report()
            if self.answer_spikes():
                return True
        best = None
        if is_validation:
            with window.phases.measure("validation"):
                best = self.validate(is_save)
        if (is_validation or (is_save and run.validation is None)) and not run.stop.agreed:
            with window.phases.measure("logging"):
                show_model(run, self.samples)
        if is_save or best is not None:
            with window.phases.measure("checkpoint"):
                self.saver.save_last(best, window.phases) if is_finished else self.saver.save(best)
        show_progress(self.progress, run, window, self.saver)
        return False

    def validate(self, is_save: bool) -> Best | None:
        try:
            return report_validation(self.run, is_save, self.window.phases)
        except collectives.Unreadable as unread:
            self.leave_unread(unread.failure)

    def answer_spikes(self) -> bool:
        """Tell of spikes among the steps reported. With --on_spike rollback go back, and leave that batch out."""
        run = self.run
        found = self.spikes.find(self.window.step_losses)
        for spike, median in found:
            console.warn(describe_spike(spike, median))
        if not found or run.settings.flags.on_spike != "rollback":
            return False
        spike = found[0][0]
        if not go_back(run, spike.step, (spike.first_sample, spike.next_sample)):
            console.warn("there is no checkpoint from before it to go back to; training goes on")
            return False
        rollbacks = count_rollbacks(run.state.rollbacks, run.state.samples)
        if rollbacks > MAX_ROLLBACKS:
            raise UserError(
                f"{describe_spike(*found[0])}: after going back to step {run.state.step} {rollbacks - 1} times the "
                f"loss still jumps, so it is not the batches; lower the learning rate, or lengthen the warm-up, and "
                f"start again. The checkpoint of that step is good; to have the batches that were left out again, "
                f"remove {run.checkpoints.folder / SKIPS}"
            )
        self.bad_steps.skipped = run.engine.skipped_steps
        self.window.reset()
        self.saver.saved_step = run.state.step
        console.warn(f"went back to step {run.state.step}; samples {spike.first_sample} on are left out")
        return True

    def leave_unread(self, failure: BaseException | None) -> NoReturn:
        """A rank cannot read on: save what there is, then end with its reader's own message, told by one rank."""
        self.save_now()
        raise collectives.Unreadable(failure)

    def save_now(self) -> None:
        """What there is since the last checkpoint, without waiting for space."""
        if self.run.state.step > self.saver.saved_step:
            if self.window.num_steps:
                self.window.sum_up()
            self.saver.save_last(None, self.window.phases, patience=0.0)
        else:
            self.saver.wait()

    def leave_early(self) -> None:
        """Save what there is since the last checkpoint; the next start goes on from here."""
        run, reason = self.run, self.run.stop.reason or "another rank was asked to stop"
        has_figures = run.state.step > self.saver.saved_step and self.window.num_steps > 0
        is_back = False
        if has_figures:
            self.window.sum_up()
            is_back = self.answer_spikes()
        self.save_now()
        if has_figures and not is_back:
            self.window.tell()
        console.say(f"stopped at step {run.state.step} ({reason}); the same command goes on from here")


def go_back(run: Run, step: int, samples: tuple[int, int]) -> bool:
    """Load the newest checkpoint from before `step`, and leave out `samples` from now on; whether there is one."""
    with suppress(SaveFailed):
        run.checkpoints.finish()
    skips = Skips(run.state.skips, run.state.rollbacks).merged(Skips((samples,), (samples,)))
    tag = collectives.all_ranks_from_main(lambda: run.checkpoints.newest_valid(before_step=step))
    if tag is None:
        return False
    origin = ResumePoint(run.checkpoints.folder, tag, is_own=True)
    saved = read_state(origin.path)
    load_engine(run.engine, origin, saved, run.rank_info)
    guard_engine(run.engine)
    run.state = replace(
        saved,
        world_size=run.rank_info.world_size,
        seconds=run.state.seconds,  # time goes on
        recipe=run.state.recipe,
        data_summary=run.state.data_summary,
        skips=skips.ranges,
        rollbacks=skips.rollbacks,
    )
    if run.rank_info.is_main:
        note_skips(run.checkpoints.folder, skips)
    run.sinks.go_back(run.state)
    return True


def pass_skips(run: Run) -> bool:
    """Move the cursor past samples that are left out. True: they were all that was left of the run."""
    while True:
        cursor = next_unskipped(run.state.samples, run.state.skips, run.plan.at(run.state.samples).rows)
        if cursor == run.state.samples:
            return False
        run.state = replace(run.state, samples=cursor)  # where steps may be of another size
        if run.horizon.is_finished(run.state.step, cursor):
            return True


def read_steps(run: Run, phases: SectionTimer) -> Generator[StepBatches]:
    """Steps from the run's cursor on, of the size that the plan gives there; times the waiting.

    Follows the cursor where it is moved between two steps.
    """
    while True:
        cursor = run.state.samples
        segment = run.plan.at(cursor)
        run.stream = build_stream(run.settings, run.rank_info, run.training, segment)
        set_batch(run.engine, segment)
        with closing(run.stream.steps(cursor)) as steps:  # type: ignore[type-var]
            while run.state.samples == cursor and run.plan.at(cursor) is segment:
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
    """The next step's rate."""
    return run.schedule.rate(run.schedule_position())


def should_stop(run: Run, window: MetricsWindow) -> bool:
    """Whether the step just taken was the last. With a time budget rank 0's clock decides for all."""
    if run.budget.total is not None and is_time_over(run, window):
        return True
    return run.horizon.is_finished(run.state.step, run.state.samples)


def is_time_over(run: Run, window: MetricsWindow) -> bool:
    """Rank 0's clock and verdict, on every rank: each has its own, and they must not part."""
    used = run.budget.used()
    is_over = run.budget.is_over(used, window.seconds_per_step())
    told = torch.tensor([used, float(is_over)], dtype=torch.float64, device=run.device)
    seconds, verdict = collectives.all_ranks_sum(told if run.rank_info.is_main else torch.zeros_like(told)).tolist()
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


def show_progress(progress: tqdm, run: Run, window: MetricsWindow, saver: Saver) -> None:
    if progress.disable:
        return
    epoch = run.plan.passes(run.state.samples)
    if window.figures:
        left = seconds_left(run, window.seconds_per_micro_step)
        to_save = min(left, saver.seconds_to_next(window.figures["seconds_per_step"]))
        progress.set_postfix_str(live_text(epoch, window.figures, left, to_save), refresh=False)
    elif (loss := window.loss_so_far()) is not None:
        every = run.settings.flags.print_steps
        first = run.state.step + every - run.state.step % every
        progress.set_postfix_str(first_live_text(epoch, loss, window.rate, first), refresh=False)
    progress.update(run.state.step - progress.n)


def report_validation(run: Run, is_save: bool, phases: SectionTimer) -> Best | None:
    """Validate; what to note in the checkpoint that --keep_best asks for when this is the lowest loss so far."""
    assert run.validation is not None
    began = time.perf_counter()
    rows = validation_rows(run.settings.deepspeed.batch.micro, run.settings.flags.max_seq_length, run.validation_length)
    figures = validate(run.engine, run.validation, run.rank_info, rows, run.device, run.stop, phases)
    if figures is None:
        return None
    run.budget.note_pause(time.perf_counter() - began)
    loss, lowest = figures["mlm_loss"], run.state.best_validation_loss
    is_best = math.isfinite(loss) and (lowest is None or loss < lowest)
    is_kept = is_best and run.settings.flags.keep_best
    if is_best:
        run.state = replace(run.state, best_validation_loss=loss)
    if is_kept:
        run.state = replace(run.state, best_tag=tag_of(run.state), best_is_only=not is_save)
    say_validation(run.state.step, figures)
    run.sinks.record("validation", run.state.step, run.state.samples, figures)
    if not is_kept:
        return None
    return Best(tag_of(run.state), loss, is_only_best=not is_save)


def show_model(run: Run, samples: Samples) -> None:
    """Guesses for fixed sentences, and histograms when asked for.

    At stage 3 all ranks guess, because each layer's weights are gathered from all of them as it is computed; there are
    no whole weights for histograms.
    """
    is_partitioned = run.settings.deepspeed.zero_stage == 3
    if not (run.rank_info.is_main or is_partitioned):
        return
    table = samples.table(run.engine.module, run.device)
    if table is not None:
        run.sinks.text("guesses", table, run.state.step)
    if run.settings.flags.log_histograms and not is_partitioned:
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

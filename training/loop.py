"""The training loop."""

from contextlib import closing
from functools import partial
from typing import NamedTuple

from common.console import console
from common.words import counted
from data.randomness import seed_of
from nvidia.layer_drop import keep_theta
from training.build import Run
from training.engine.build import all_ranks_take_step
from training.engine.gradients import MovementWatch, can_lower_loss_scale
from training.export.hugging_face import all_ranks_export
from training.export.model_card import CardRequest
from training.faults.bad_steps import BadSteps, TooManyBadSteps
from training.faults.spikes import SpikeResponse
from training.faults.step_reader import StepReader
from training.inputs.datasets import build_stream
from training.loop_parts import LoopParts, all_ranks_build_parts, all_ranks_build_window
from training.metrics.health import Health
from training.metrics.window import MetricsWindow, Tally
from training.optimizers.build import set_learning_rate
from training.report import Reporter, finish_sinks
from training.runtime import collectives
from training.runtime.collectives import Unreadable


def all_ranks_train(run: Run) -> bool:
    """Train to the end; report, validate and save on the way. False: stopped on request, with everything saved."""
    parts = all_ranks_build_parts(run)
    if run.clock.is_finished():
        console.say(f"finished already, at step {run.progress.step}: nothing to do")
        if not all_ranks_complete_end(run, parts):
            console.say("stopped during the last validation; the same command repeats it")
            return False
    elif Loop(run, parts, all_ranks_build_window(run)).all_ranks_run():
        finish_sinks(run)
    else:
        run.sinks.close()
        return False
    flags = run.settings.flags.checkpoints
    if flags.export_dir is not None:
        run.timer.begin("export")
        which = flags.export or (None if flags.keeps_best else "last")
        request = CardRequest(flags.export_license, flags.export_language)
        all_ranks_export(
            run.checkpoints.folder, which, flags.export_dir, run.settings.tokenizer, run.sinks.lines, request
        )
    return True


def all_ranks_complete_end(run: Run, parts: LoopParts) -> bool:
    """Do what a stop during the last validation or probe left out. False: stopped on request again."""
    step = run.progress.step
    has_ended, has_validation, has_probe = collectives.all_ranks_from_main(
        lambda: tuple(run.sinks.has(kind, step) for kind in ("end", "validation", "probe"))
    )
    best = None
    if parts.validator is not None and not has_validation:
        best = parts.validator.all_ranks_validate(is_save_due=True)
    if parts.prober is not None and not has_probe and not run.stop.agreed:
        best = parts.prober.all_ranks_probe(is_save_due=True) or best
    if best is not None:
        parts.saver.all_ranks_save(best)  # the checkpoint exists, and is only marked
    if run.stop.all_ranks_agreed():
        return False
    if not has_ended:
        parts.preview.all_ranks_write(step)
        finish_sinks(run)
    return True


class Due(NamedTuple):
    """What follows a step."""

    report: bool = False
    validation: bool = False
    probe: bool = False
    save: bool = False


class Loop:
    """Takes steps, reports, validates and saves, until the run is finished or asked to stop."""

    def __init__(self, run: Run, parts: LoopParts, window: MetricsWindow) -> None:
        settings, flags = run.settings, run.settings.flags.training
        self.engine, self.grad_norm, self.device = run.engine, run.grad_norm, run.device
        self.progress, self.clock, self.timer, self.stop = run.progress, run.clock, run.timer, run.stop
        self.saver, self.validator, self.prober, self.preview = parts
        self.is_main = run.rank_info.is_main
        self.print_steps, self.validate_every = flags.print_steps, flags.validate_every_steps
        self.layer_drop = settings.deepspeed.layer_drop if settings.flags.model.progressive_layer_drop else None
        self.movement = MovementWatch(run.engine)
        self.window = window
        health = Health(settings.deepspeed.batch.total, run.clock.schedule.origin)
        self.reporter = Reporter(window, health, run.sinks, run.clock, run.engine, run.grad_norm, flags.print_steps)
        open_stream = partial(build_stream, run.datasets.training, run.rank_info, flags.seed, settings.masking)
        self.reader = StepReader(open_stream, run.clock.horizon.plan, run.progress, run.engine, run.timer)
        bad_rows = settings.runs / f"bad_batches_rank_{run.rank_info.rank}.jsonl"
        self.bad_steps = BadSteps(settings.flags.faults.max_bad_steps, bad_rows, run.checkpoints.folder)
        does_roll_back = settings.flags.faults.on_spike == "rollback"
        self.spikes = SpikeResponse(does_roll_back, run.checkpoints, run.engine, run.progress, run.sinks)

    def all_ranks_run(self) -> bool:
        """True: the end was reached. False: all ranks have agreed to stop, and everything is saved."""
        with closing(self.reader), closing(self.reporter.bar):
            try:
                is_finished = self.all_ranks_take_steps()
            except TooManyBadSteps as error:
                self.progress.move_cursor(error.first_sample)  # none of these steps was applied
                self.all_ranks_save_unsaved()
                raise
            except Unreadable:
                if not self.stop.all_ranks_agreed():  # a stop request ends the wait for a shard
                    self.all_ranks_save_unsaved()
                    raise
                is_finished = False
        if is_finished and not self.stop.agreed:
            return True
        self.all_ranks_leave_early()
        return False

    def all_ranks_take_steps(self) -> bool:
        """Whether the end was reached."""
        if self.prober is not None:
            self.prober.all_ranks_probe_start()
        is_finished, is_stopped = False, self.stop.all_ranks_agreed()
        while not (is_finished or is_stopped):
            epoch, step = self.clock.epoch(), self.progress.step
            self.all_ranks_take_step()
            self.clock.all_ranks_agree_on_time(self.window.seconds_per_step())
            is_finished = self.clock.is_finished()
            is_stopped, is_overdue = self.all_ranks_exchange_requests(is_finished)
            if is_stopped and not is_finished:
                break
            due = self.find_due(epoch, self.progress.step > step, is_finished, is_overdue)
            if self.all_ranks_report(due):
                is_finished = False  # rolled back to an earlier step
                continue
            is_finished = self.all_ranks_measure_and_save(due, is_finished)
            is_stopped = is_stopped or self.stop.agreed  # during the validation
            self.reporter.update_bar(self.saver.seconds_to_next)
        return is_finished

    def all_ranks_take_step(self) -> None:
        """Take one optimizer step and move the cursor past its rows, unless all rows that are left are skipped."""
        self.clock.pass_skipped_samples()
        if self.clock.is_out_of_rows():
            return
        batches, epoch = self.reader.all_ranks_next(), self.clock.epoch()
        lr = self.clock.learning_rate()
        set_learning_rate(self.engine.optimizer, lr)
        self.choose_layers()
        self.grad_norm.note_scale()
        self.movement.before_step(lr)
        tally, num_skipped = Tally(), self.engine.skipped_steps
        all_ranks_take_step(self.engine, batches, tally, self.timer, self.progress.state.seed, self.device)
        is_applied = self.engine.skipped_steps == num_skipped
        for warning in self.movement.all_ranks_after_step(is_applied):
            console.warn(warning)
        if is_applied:
            self.bad_steps.note_good()
        elif not can_lower_loss_scale(self.engine):
            self.bad_steps.note_bad(batches, self.reader.dataset, self.progress)
        # A step that the engine skipped has consumed its rows, but is not a step.
        step = self.engine.global_steps - self.engine.skipped_steps
        self.progress.advance(step, self.clock.horizon.next_sample(batches.next_sample))
        if is_applied:
            self.reporter.count(tally, batches, epoch, lr)

    def choose_layers(self) -> None:
        """--progressive_layer_drop: choose the blocks that this step drops, the same on all ranks and on resume."""
        if self.layer_drop is not None:
            step = self.progress.step
            theta = keep_theta(step, self.layer_drop.theta, self.layer_drop.gamma)
            self.engine.module.set_layer_drop(theta, seed_of("layer drop", self.progress.state.seed, step))

    def all_ranks_exchange_requests(self, is_finished: bool) -> tuple[bool, bool]:
        """(stop, save): whether any rank was asked to stop, and whether a save is overdue.

        The only exchange about requests in a step, so a stop waits for the step to end. Raises Unreadable on all ranks
        where one cannot read the next step.
        """
        is_stopped, is_overdue, is_unreadable, is_behind = collectives.all_ranks_any(
            self.stop.reason is not None,
            self.is_main and self.saver.is_overdue(),
            self.reader.failure is not None,
            not self.reader.has_next,
        )
        self.reader.note_prefetched(on_all_ranks=not is_behind)
        if is_unreadable and not is_finished:
            raise Unreadable(self.reader.failure)
        return is_stopped, is_overdue

    def find_due(self, epoch: int, is_new_step: bool, is_finished: bool, is_overdue: bool) -> Due:
        """What is due after a step that began in `epoch`. After one that was not applied, only an overdue save is."""
        if not (is_new_step or is_finished):
            return Due(save=is_overdue)
        step, every = self.progress.step, self.validate_every
        validation = self.validator is not None and (is_finished or (every is not None and step % every == 0))
        probe = self.prober is not None and (is_finished or self.prober.is_due(step))
        save = is_finished or is_overdue or self.saver.is_due(epoch)
        return Due(is_finished or step % self.print_steps == 0, validation, probe, save)

    def all_ranks_report(self, due: Due) -> bool:
        """Report, or settle the steps before a validation or a save. True: a spike among them caused a rollback."""
        if due.report and self.window.num_steps:
            losses = self.reporter.all_ranks_close()
            self.reporter.write()
        elif (due.validation or due.probe or due.save) and self.window.num_unsettled:
            losses = self.reporter.all_ranks_settle()
        else:
            return False
        is_rolled_back = self.spikes.all_ranks_respond(losses)
        if is_rolled_back:
            self.reporter.discard()
            self.saver.note_rollback()
        return is_rolled_back

    def all_ranks_measure_and_save(self, due: Due, is_finished: bool) -> bool:
        """Validate, probe and save as is due. Whether the run is finished: --stop_after_no_gain can end it here."""
        best = None
        if due.validation:
            assert self.validator is not None
            best = self.validator.all_ranks_validate(is_save_due=due.save)
        if due.probe and not self.stop.agreed:
            assert self.prober is not None
            best = self.prober.all_ranks_probe(is_save_due=due.save) or best
        if (due.validation or (due.save and self.validator is None)) and not self.stop.agreed:
            with self.timer.measure("logging"):
                self.preview.all_ranks_write(self.progress.step)
        if not is_finished and not self.stop.agreed and self.clock.has_stalled():
            self.all_ranks_end_early()
            due, is_finished = due._replace(save=True), True
        if due.save or best is not None:
            with self.timer.measure("checkpoint"):
                self.saver.all_ranks_save_last(best) if is_finished else self.saver.all_ranks_save(best)
        return is_finished

    def all_ranks_end_early(self) -> None:
        """Say why the run ends here, and report the steps since the last report."""
        state, watched = self.progress.state, None if self.prober is None else self.prober.watched
        best = state.best_validation_loss if watched is None else state.best_probe
        console.say(
            f"ended at step {state.step} (--stop_after_no_gain {self.clock.max_checks_without_gain}): "
            f"{watched or 'the validation loss'} has not improved for "
            f"{counted(state.checks_without_gain, 'measurement')}; "
            + ("none was finite" if best is None else f"the best was {best:.4f}")
        )
        if self.window.num_steps:
            self.reporter.all_ranks_close()
            self.reporter.write()

    def all_ranks_save_unsaved(self) -> None:
        """Save the steps since the last checkpoint, before the run ends with an error."""
        if self.saver.has_unsaved_steps and self.window.num_unsettled:
            self.reporter.all_ranks_settle()
        self.saver.all_ranks_save_unsaved()

    def all_ranks_leave_early(self) -> None:
        """Save the steps since the last checkpoint, then report those since the last report."""
        reason = self.stop.reason or "another rank was asked to stop"
        is_reported = False
        if self.window.num_steps:
            is_reported = not self.spikes.all_ranks_respond(self.reporter.all_ranks_close())
            if not is_reported:
                self.saver.note_rollback()
        self.saver.all_ranks_save_unsaved()
        if is_reported:
            self.reporter.write()
        console.say(f"stopped at step {self.progress.step} ({reason}); the same command resumes from here")

"""Reports of a run: the figures of a window on the console and in every sink, with warnings; the live bar; the run's
hyperparameters for TensorBoard's table of runs."""

import math
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from common.console import console
from common.hardware import describe_hardware
from common.words import counted, format_seconds
from data.stream.loader import StepBatches
from training.build import Run
from training.clock import Clock
from training.engine.gradients import GradientNorm, GradientWatch
from training.metrics.health import Health, describe_without_gradient
from training.metrics.sinks import Sinks
from training.metrics.window import MetricsWindow, StepLoss, Tally, WindowReport
from training.plan.learning_rate import effective_recipe
from training.settings.resolve import Settings

WATCHED_STEPS = 2  # in which every parameter should get a gradient
# What people vary between runs, beside the recipe: for TensorBoard's table of runs.
MODEL_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "sentence_head",
)


class Reporter:
    """Collects steps in `window`; `all_ranks_close` ends the window, and `write` reports it.

    Before a checkpoint within a window, `all_ranks_settle` brings the training state up to date.
    """

    def __init__(
        self,
        window: MetricsWindow,
        health: Health,
        sinks: Sinks,
        clock: Clock,
        engine: Any,
        grad_norm: GradientNorm,
        print_steps: int,
    ) -> None:
        self.print_steps = print_steps
        self.window, self.health, self.sinks = window, health, sinks
        self.clock, self.progress = clock, clock.progress
        self.engine, self.grad_norm = engine, grad_norm
        self.gradients = GradientWatch(engine.module, WATCHED_STEPS)
        self.lr = 0.0  # of the last step
        self.closed: WindowReport | None = None  # the last one
        self.figures: dict[str, float] = {}  # of the last report
        self.is_early_end_known = False
        total, step = clock.last_step(), clock.progress.step
        self.bar: tqdm = console.progress(total=total, initial=step, unit="step", dynamic_ncols=True)

    def count(self, tally: Tally, batches: StepBatches, epoch: int, lr: float) -> None:
        """Count a step that was applied, and that `progress` includes. `epoch`: in which it began."""
        self.lr = lr
        num_layers = sum(scale > 0 for scale in self.engine.module.bert.encoder.branch_scales)
        self.window.count(self.progress.step, tally, batches, num_layers)
        if self.window.rank_info.is_main and self.health.needs_rows:
            for batch in batches.micro_batches:
                self.health.watch_rows(epoch, batch.input_ids.numpy(), batch.masked_lm_labels.numpy())
        without_gradient = self.gradients.end_step()
        if without_gradient:
            console.warn(describe_without_gradient(without_gradient))

    def all_ranks_settle(self) -> list[StepLoss]:
        """Count the tokens of the steps since the last settled one, without a report. Returns each step's loss."""
        return self._add_tokens(self.window.all_ranks_settle())

    def _add_tokens(self, settled: list[StepLoss]) -> list[StepLoss]:
        self.progress.add_tokens(sum(step.num_tokens for step in settled))
        return settled

    def discard(self) -> None:
        """Discard the steps since the last report: the run was rolled back."""
        self.window.reset()
        self.window.timer.lap()

    def all_ranks_close(self) -> list[StepLoss]:
        """Turn the counts since the last report into figures. Returns the loss of each step not settled before."""
        self.closed = self.window.all_ranks_close()
        losses = self._add_tokens(self.closed.settled)
        norm = self.grad_norm.value()
        self.figures = {
            **self.closed.figures,
            "learning_rate": self.lr,
            "grad_norm": math.nan if norm is None else norm,
            "epoch": self.clock.passes(),
            "tokens": float(self.progress.state.tokens),
            "skipped_steps": float(self.engine.skipped_steps),
        }
        if self.engine.fp16_enabled():
            self.figures["loss_scale"] = float(self.engine.optimizer.loss_scale)
        return losses

    def write(self) -> None:
        """Write the figures of the window that was closed last."""
        assert self.closed is not None
        step, pace = self.progress.step, self.closed.seconds_per_micro_step
        with self.window.timer.measure("logging"):
            left, is_part = self.clock.seconds_left(pace), self.figures["window_steps"] < self.print_steps
            console.say(train_line(step, self.clock.last_step(), self.figures, left, is_part))
            early_end = self.clock.find_early_end(pace)
            if early_end and not self.is_early_end_known:
                self.is_early_end_known = True
                console.warn(early_end)
            for warning in self.health.check(step, self.figures, self.closed.paces, self.clock.is_warm()):
                console.warn(warning)
            self.sinks.record("train", step, self.progress.samples, self.figures)

    def update_bar(self, seconds_to_save: Callable[[float], float]) -> None:
        """Show the last report's figures on the live bar; before the first report, this rank's loss so far.

        `seconds_to_save` estimates the time to the next checkpoint from the seconds per step.
        """
        if self.bar.disable:
            return
        step, epoch = self.progress.step, f"epoch {self.clock.passes():.2f}"
        if self.closed is not None:
            figures, left = self.figures, self.clock.seconds_left(self.closed.seconds_per_micro_step)
            to_save = min(left, seconds_to_save(self.window.seconds_per_step()))
            text = (
                f"{epoch}  loss {figures['loss']:.3f}  lr {figures['learning_rate']:.1e}  "
                f"{figures['tokens_per_second']:,.0f} tokens/s  matmul {figures['matmul_share']:.0%}  "
                f"ETA {format_seconds(left)}  next save in {format_seconds(to_save)}"
            )
            self.bar.set_postfix_str(text, refresh=False)
        elif (loss := self.window.loss_so_far()) is not None:
            first = step + self.print_steps - step % self.print_steps
            text = f"{epoch}  loss {loss:.3f} so far  lr {self.lr:.1e}  first report at step {first}"
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)


def train_line(step: int, last_step: int | None, figures: dict[str, float], seconds_left: float, is_part: bool) -> str:
    """The console line of a report. `last_step` None: the time budget ends the run.

    `is_part`: it covers fewer steps than --print_steps, because the run ends or was resumed here.
    """
    place = f"step {step}" if last_step is None else f"step {step}/{last_step}"
    if is_part:
        place += f" (last {counted(int(figures['window_steps']), 'step')} only)"
    nsp = f"  nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})" if "nsp_loss" in figures else ""
    return (
        f"{place}  loss {figures['loss']:.3f}  mlm {figures['mlm_loss']:.3f} ({figures['mlm_accuracy']:.1%}){nsp}  "
        f"lr {figures['learning_rate']:.2e}  grad_norm {figures['grad_norm']:.2f}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s  matmul {figures['matmul_share']:.0%}  "
        f"data wait {figures['data_wait_share']:.0%}  ETA {format_seconds(seconds_left)}"
    )


def finish_sinks(run: Run) -> None:
    """Write the end of a run, with its line in TensorBoard's table of runs."""
    hardware = describe_hardware(run.device, run.rank_info.world_size)
    run.sinks.finish(hyperparameters(run.settings), run.progress.step, run.progress.samples, hardware)


def hyperparameters(settings: Settings) -> dict[str, Any]:
    """Settings by name, without those that have no effect in this run."""
    flags, model = settings.flags.training, settings.model_config.to_dict()
    found = {
        **effective_recipe(settings.recipe()),
        "max_steps": flags.max_steps,
        "max_seq_length": settings.flags.data.max_seq_length,
        "precision": settings.precision,
        "zero_stage": settings.deepspeed.zero_stage,
        "seed": flags.seed,
        "is_preln": settings.flags.model.preln,
        **{key: model[key] for key in MODEL_KEYS},
    }
    return {key: value for key, value in found.items() if value is not None}

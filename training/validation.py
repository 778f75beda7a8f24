"""Validation: one pass over separate shards with fixed masks; the same figures on any number of ranks."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.console import console
from common.words import counted
from data.shards.dataset import PretrainingDataset
from data.stream.batches import Batch
from data.stream.loader import evaluation_batches
from training.checkpoints.state import Best
from training.clock import Clock
from training.engine.build import to_device
from training.metrics.sinks import Sinks
from training.metrics.timing import SectionTimer
from training.metrics.window import BatchSpread, Tally, summarize
from training.runtime.collectives import Unreadable, attempt
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests

STANDARD_ERROR = "standard_error"  # of mlm_loss, for the console only: it depends on the micro-batches
MIN_ROWS_TO_CHOOSE = 200  # of validation data, for a best checkpoint that is more than chance


def validation_rows(micro: int, training_length: int, length: int) -> int:
    """Rows of `length` tokens in a micro-batch: `micro`, or fewer longer rows with as many tokens."""
    return max(1, min(micro, micro * training_length // length))


@dataclass(frozen=True)
class Validator:
    """Validates a run and keeps track of its lowest loss."""

    engine: Any
    dataset: PretrainingDataset
    micro_batch_size: int
    rank_info: RankInfo
    device: torch.device
    stop: StopRequests
    timer: SectionTimer
    clock: Clock
    sinks: Sinks
    keeps_best: bool  # --keep_best
    is_watched: bool = False  # --stop_after_no_gain goes by the validation loss

    def all_ranks_validate(self, *, is_save_due: bool) -> Best | None:
        """Validate and report. Returns the mark of the checkpoint that --keep_best asks for, or None.

        Raises Unreadable where a rank cannot read its data. A stop request ends the validation without figures.
        """
        began = time.perf_counter()
        with self.timer.measure("validation"):
            figures = self.all_ranks_measure()
        if figures is None:
            return None
        error = figures.pop(STANDARD_ERROR, None)
        self.clock.budget.note_pause(time.perf_counter() - began)
        progress, loss = self.clock.progress, figures["mlm_loss"]
        is_first = progress.state.best_validation_loss is None
        best = progress.note_validation(
            loss, is_kept=self.keeps_best, is_saved_anyway=is_save_due, is_watched=self.is_watched
        )
        console.say(validation_line(progress.step, figures, error))
        if is_first and self.is_choice_uncertain:
            size = "unknown: there is one micro-batch" if error is None else f"± {error:.3f} nats"
            console.warn(
                f"--keep_best: the validation data has {counted(self.dataset.num_rows, 'row')}, expected at least "
                f"{MIN_ROWS_TO_CHOOSE}. The standard error of the loss is {size}, so checkpoints that differ by less "
                f"may be ranked by chance. Prepare a larger share (data.prepare --validation_share)"
            )
        self.sinks.record("validation", progress.step, progress.samples, figures)
        return best

    @property
    def is_choice_uncertain(self) -> bool:
        """Whether --keep_best chooses by too few rows."""
        return self.keeps_best and self.dataset.num_rows < MIN_ROWS_TO_CHOOSE

    @torch.no_grad()
    def all_ranks_measure(self) -> dict[str, float] | None:
        """The figures of one pass, with STANDARD_ERROR where the choice is uncertain and it can be measured.

        None: a stop request came first, and the checkpoint is more urgent.
        """
        tally, spread = Tally(), BatchSpread()
        batches = evaluation_batches(
            self.dataset,
            rank=self.rank_info.rank,
            world_size=self.rank_info.world_size,
            micro_batch_size=self.micro_batch_size,
        )
        self.engine.eval()
        try:
            while (batch := _all_ranks_next(batches, self.stop)) is not None:
                self.timer.begin("validation")
                inputs, tokens = to_device(batch, self.device)
                self.engine(inputs, tokens=tokens)
                tally.add(self.engine.module.details)
                spread.add(self.engine.module.details)
        finally:
            self.engine.train()
        if self.stop.agreed:
            return None
        figures = summarize(tally.all_ranks_total())
        error = spread.all_ranks_standard_error() if self.is_choice_uncertain else None
        if error is not None:
            figures[STANDARD_ERROR] = error
        return {**figures, "perplexity": math.exp(min(figures["mlm_loss"], 700.0))}


def validation_line(step: int, figures: dict[str, float], standard_error: float | None = None) -> str:
    """`standard_error`: of the masked-LM loss; None: it is not shown."""
    error = "" if standard_error is None else f" ± {standard_error:.3f}"
    nsp = (
        f"  nsp loss {figures['nsp_loss']:.3f} (accuracy {figures['nsp_accuracy']:.1%})"
        if "nsp_loss" in figures
        else ""
    )
    return (
        f"validation at step {step}: mlm loss {figures['mlm_loss']:.3f}{error} "
        f"(perplexity {figures['perplexity']:.1f}, accuracy {figures['mlm_accuracy']:.1%}){nsp}"
    )


def _all_ranks_next(batches: Iterator[Batch], stop: StopRequests) -> Batch | None:
    """None: there are no more, or all ranks have agreed to stop. Every rank has the same number of batches."""
    batch, failure = attempt(lambda: next(batches, None))
    if batch is None and failure is None:
        return None
    is_stopped, is_unreadable = stop.all_ranks_agree(failure is not None)
    if is_unreadable and not is_stopped:  # a stop request ends the wait for a shard
        raise Unreadable(failure)
    return None if is_stopped else batch

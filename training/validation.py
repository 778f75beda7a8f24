"""Validation: one pass over separate shards with fixed masks; the same figures on any number of ranks."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.console import console
from data.shards.dataset import PretrainingDataset
from data.stream.batches import Batch
from data.stream.loader import evaluation_batches
from training.checkpoints.retention import Best
from training.clock import Clock
from training.engine.build import to_device
from training.metrics.formatting import validation_line
from training.metrics.sinks import Sinks
from training.metrics.tally import Tally, summarize
from training.metrics.timing import SectionTimer
from training.runtime.collectives import Unreadable
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests


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

    def all_ranks_validate(self, *, is_save_due: bool) -> Best | None:
        """Validate and report. Returns the mark of the checkpoint that --keep_best asks for, or None.

        Raises Unreadable where a rank cannot read its data. A stop request ends the validation without figures.
        """
        began = time.perf_counter()
        with self.timer.measure("validation"):
            figures = self.all_ranks_measure()
        if figures is None:
            return None
        self.clock.budget.note_pause(time.perf_counter() - began)
        progress, loss = self.clock.progress, figures["mlm_loss"]
        best = progress.note_validation(loss, is_kept=self.keeps_best, is_saved_anyway=is_save_due)
        console.say(validation_line(progress.step, figures))
        self.sinks.record("validation", progress.step, progress.samples, figures)
        return best

    @torch.no_grad()
    def all_ranks_measure(self) -> dict[str, float] | None:
        """The figures of one pass. None: a stop request came first, and the checkpoint is more urgent."""
        tally = Tally()
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
                self.engine(to_device(batch, self.device))
                tally.add(self.engine.module.details)
        finally:
            self.engine.train()
        if self.stop.agreed:
            return None
        figures = summarize(tally.all_ranks_total())
        return {**figures, "perplexity": math.exp(min(figures["mlm_loss"], 700.0))}


def _all_ranks_next(batches: Iterator[Batch], stop: StopRequests) -> Batch | None:
    """None: there are no more, or all ranks have agreed to stop. Every rank has the same number of batches."""
    batch, failure = None, None
    try:
        batch = next(batches, None)
    except Exception as error:  # raised on all ranks below
        failure = error
    if batch is None and failure is None:
        return None
    is_stopped, is_unreadable = stop.all_ranks_agree(failure is not None)
    if is_unreadable:
        raise Unreadable(failure)
    return None if is_stopped else batch

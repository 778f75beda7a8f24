"""Validation: one pass over its own shards, fixed masks, no gradients; the same figures on any number of ranks."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from data.shards.dataset import PretrainingDataset
from data.stream.batches import Batch
from data.stream.loader import evaluation_batches
from training.engine.build import to_device
from training.metrics.tally import Tally, summarize
from training.metrics.timing import SectionTimer
from training.runtime.collectives import Unreadable
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests


def _next_batch(batches: Iterator[Batch], stop: StopRequests) -> Batch | None:
    """None: there are no more, or all ranks have agreed to stop. Every rank has the same number of batches."""
    batch, failure = None, None
    try:
        batch = next(batches, None)
    except Exception as error:  # raised below, after the others have been told
        failure = error
    if batch is None and failure is None:
        return None
    is_stopped, is_unread = stop.all_ranks_agree(failure is not None)
    if is_unread:
        raise Unreadable(failure)
    return None if is_stopped else batch


def validation_rows(micro: int, training_length: int, length: int) -> int:
    """Rows of `length` tokens at a time: `micro`, or as many fewer of longer ones as keep the tokens."""
    return max(1, min(micro, micro * training_length // length))


@torch.no_grad()
def validate(
    engine: Any,
    dataset: PretrainingDataset,
    rank_info: RankInfo,
    micro_batch_size: int,
    device: torch.device,
    stop: StopRequests,
    phases: SectionTimer,
) -> dict[str, float] | None:
    """None when a request to stop came first: a checkpoint is more urgent. Unreadable where a rank could not read."""
    tally = Tally()
    batches = evaluation_batches(
        dataset, rank=rank_info.rank, world_size=rank_info.world_size, micro_batch_size=micro_batch_size
    )
    engine.eval()
    try:
        while (batch := _next_batch(batches, stop)) is not None:
            phases.begin("validation")
            engine(to_device(batch, device))
            tally.add(engine.module.details)
    finally:
        engine.train()
    if stop.agreed:
        return None
    figures = summarize(tally.take())
    return {**figures, "perplexity": math.exp(min(figures["mlm_loss"], 700.0))}

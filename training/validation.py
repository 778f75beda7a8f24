"""Validation: one pass over its own shards, fixed masks, no gradients; the same figures on any number of ranks."""

import math
from typing import Any

import torch

from data.loader import evaluation_batches
from data.shards import PretrainingDataset
from training.engine import to_device
from training.environment import Place
from training.metrics import Tally, summarize
from training.stopping import StopRequests
from training.timing import Phases


@torch.no_grad()
def validate(
    engine: Any,
    dataset: PretrainingDataset,
    place: Place,
    micro_batch_size: int,
    device: torch.device,
    stop: StopRequests,
    phases: Phases,
) -> dict[str, float] | None:
    """None when a request to stop came first: a checkpoint is more urgent."""
    tally = Tally()
    engine.eval()
    is_stopped = False
    for batch in evaluation_batches(
        dataset, rank=place.rank, world_size=place.world_size, micro_batch_size=micro_batch_size
    ):
        is_stopped = stop.is_agreed()
        if is_stopped:
            break
        phases.begin("validation")
        engine(to_device(batch, device))
        tally.add(engine.module.details)
    engine.train()
    if is_stopped:
        return None
    figures = summarize(tally.take())
    return {**figures, "perplexity": math.exp(min(figures["mlm_loss"], 700.0))}

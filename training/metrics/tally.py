"""Sums of the model's losses and counts: kept on the device, reduced over all ranks when they are needed."""

import math
from typing import Any

import torch

from training.runtime import collectives


class Tally:
    """Sums of the model's details. Adding is asynchronous; reading waits for the device."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None
        self.names: tuple[str, ...] = ()

    def add(self, details: Any) -> None:
        """Add the details of one forward pass: a named tuple of 0-dim tensors."""
        values = torch.stack([value.detach().double() for value in details])
        self.names = details._fields
        self.sums = values if self.sums is None else self.sums + values

    def all_ranks_total(self) -> dict[str, float]:
        """The sums over all ranks, by name."""
        assert self.sums is not None, "all_ranks_total() before the first add()"
        return dict(zip(self.names, collectives.all_ranks_sum(self.sums.clone()).tolist(), strict=True))


class BatchSpread(Tally):
    """How much the masked-LM loss differs between micro-batches: the uncertainty of its mean over all of them."""

    def add(self, details: Any) -> None:
        """Add the details of one forward pass. Asynchronous, as Tally.add()."""
        loss, count = details.masked_lm_loss_sum.detach().double(), details.masked_lm_count.detach().double()
        values = torch.stack([loss, count, loss * loss, loss * count, count * count, (count > 0).double()])
        self.sums = values if self.sums is None else self.sums + values

    def all_ranks_standard_error(self) -> float | None:
        """The standard error of the mean masked-token loss, in nats; None: there are fewer than two micro-batches."""
        assert self.sums is not None, "all_ranks_standard_error() before the first add()"
        loss, count, squares, products, counts, batches = collectives.all_ranks_sum(self.sums.clone()).tolist()
        if batches < 2:
            return None
        mean = loss / count
        residuals = max(0.0, squares - 2 * mean * products + mean * mean * counts)
        return math.sqrt(residuals * batches / (batches - 1)) / count


def summarize(sums: dict[str, float]) -> dict[str, float]:
    """Means per masked token and per sentence pair from a tally's sums. Without pairs there are no figures of them."""
    masked, pairs = max(sums["masked_lm_count"], 1.0), sums["next_sentence_count"]
    mlm = sums["masked_lm_loss_sum"] / masked
    figures = {"loss": mlm, "mlm_loss": mlm, "mlm_accuracy": sums["masked_lm_correct"] / masked}
    if not pairs:
        return figures
    nsp = sums["next_sentence_loss_sum"] / pairs
    return {**figures, "loss": mlm + nsp, "nsp_loss": nsp, "nsp_accuracy": sums["next_sentence_correct"] / pairs}

"""Figures of a run: sums kept on the device, and reduced over all ranks once a window."""

from typing import Any

import torch

from training.runtime import collectives


class Tally:
    """Sums of the model's details. Adding is asynchronous; reading them synchronises, once."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None
        self.names: tuple[str, ...] = ()

    def add(self, details: Any) -> None:
        """Add one forward's details: a named tuple of 0-dim tensors."""
        values = torch.stack([value.detach().double() for value in details])
        self.names = details._fields
        self.sums = values if self.sums is None else self.sums + values

    def take(self, host: dict[str, float] | None = None) -> dict[str, float]:
        """The sums over all ranks since the last call, and with them those of `host`'s values; begins anew."""
        assert self.sums is not None, "take() before the first add()"
        host = host or {}
        values = torch.cat([self.sums, self.sums.new_tensor(list(host.values()))])
        totals = collectives.all_ranks_sum(values).tolist()
        self.sums = None
        return dict(zip((*self.names, *host), totals, strict=True))


def summarize(sums: dict[str, float]) -> dict[str, float]:
    """Means per masked token and per pair from a tally's sums."""
    masked = max(sums["masked_lm_count"], 1.0)
    pairs = max(sums["next_sentence_count"], 1.0)
    mlm = sums["masked_lm_loss_sum"] / masked
    nsp = sums["next_sentence_loss_sum"] / pairs
    return {
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp,
        "mlm_accuracy": sums["masked_lm_correct"] / masked,
        "nsp_accuracy": sums["next_sentence_correct"] / pairs,
    }

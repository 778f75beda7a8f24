"""Floating-point operations: how many a batch needs, and how many a second this machine's matmul gives.

B sequences, T real tokens, M masked tokens, U = B + M used tokens, H hidden size, I intermediate size.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nvidia.config import BertConfig
from nvidia.cpu.linear import linear

# Work of one forward and one backward pass, in forwards. Recomputation is not counted: it is not useful work.
PASSES = 3
MAX_TOKENS = 4096  # of the measured product: enough for full speed, short enough for a CPU
MEASURE_SECONDS = 0.3
PACE_SECONDS = 0.01  # of each of the turns
PACE_TURNS = 5


def model_flops(config: BertConfig, lengths: Tensor, num_masked: int, layers: int | None = None) -> float:
    """FLOPs (two a multiply-add) that rows of `lengths` [B] real tokens need, forward and backward.

    Counts matrix products alone: what the model must do on real tokens. In the last block all but keys and values is
    needed for used tokens only, and so are both heads; a batch is not credited with more. (Which row a used token is
    in is not known here; it counts as spread like the others.) `layers`: how many blocks took part, where layer drop
    left some out.
    """
    layers = config.num_hidden_layers if layers is None else layers
    hidden, tokens, rows = config.hidden_size, float(lengths.sum()), lengths.numel()
    used = rows + num_masked
    squares = float((lengths.double() ** 2).sum())
    wide = 3 if config.hidden_act in ("geglu", "swiglu") else 2
    # A query costs its projection, scores against all keys, their product with the values, and what follows attention.
    per_query = 2 * hidden * hidden + 2 * squares / max(tokens, 1) * hidden + wide * hidden * config.intermediate_size
    products = (
        layers * 2 * tokens * hidden * hidden
        + ((layers - 1) * tokens + used) * per_query * (layers > 0)
        + num_masked * (hidden * hidden + hidden * config.num_tokens)
    )
    if config.has_sentence_head:
        products += rows * (hidden * hidden + 2 * hidden)
    return 2.0 * PASSES * products


class MatmulProbe:
    """The two products that most of the model's work is, [T, H]·[H, I] and [T, H]·[H, H], on this rank alone."""

    def __init__(
        self,
        config: BertConfig,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        tokens, hidden = min(num_tokens, MAX_TOKENS), config.hidden_size
        sizes = (config.intermediate_size, hidden)
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(tokens, hidden, dtype=dtype, device=device, generator=generator)
        self.weights = [torch.ones(size, hidden, dtype=dtype, device=device) for size in sizes]
        self.flops = 2.0 * tokens * hidden * sum(sizes)
        self.clock = clock

    def seconds(self, num_times: int = 1) -> float:
        began = self.clock()
        for _ in range(num_times):
            for weight in self.weights:
                linear(self.x, weight)
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return self.clock() - began

    def measure_speed(self) -> float:
        """FLOP/s: the best of what fits in about a third of a second, so that a disturbance does not lower it."""
        self.seconds()  # the first call pays for allocations and for choosing kernels
        deadline = self.clock() + MEASURE_SECONDS
        best = self.seconds()
        while self.clock() < deadline:
            best = min(best, self.seconds())
        return self.flops / max(best, 1e-9)

    def measure_pace(self, slowest_speed: float) -> float:
        """Seconds for the same work on every rank, about as long as PACE_SECONDS on the slowest one.

        The median of a few turns: what disturbs one of them does not count, what slows a rank down all the time does.
        """
        num_times = max(1, round(PACE_SECONDS * slowest_speed / self.flops))
        return statistics.median(self.seconds(num_times) for _ in range(PACE_TURNS))

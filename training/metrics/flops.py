"""Floating-point operations: how many a batch needs, and how many per second this machine's matmul reaches.

B sequences, T real tokens, M masked tokens, U = B + M used tokens, H hidden size, I intermediate size.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nvidia.config import BertConfig
from nvidia.cpu.amx import avoid_broken_amx
from nvidia.cpu.linear import linear
from training.runtime.precision import DTYPES, find_abilities

# Work of one forward and one backward pass, in forward passes. Recomputation is not useful work and not counted.
PASSES = 3
MAX_TOKENS = 4096  # of the measured product: enough for full speed, short enough for a CPU
PROBED_TOKENS = 2048  # where no run gives a number
MEASURE_SECONDS = 0.3
PACE_SECONDS = 0.01  # of each of PACE_TURNS measurements
PACE_TURNS = 5
PACE_EVERY_SECONDS = 5.0  # between two measurements of a rank's pace


def model_flops(config: BertConfig, lengths: Tensor, num_masked: int, layers: int | None = None) -> float:
    """FLOPs (two per multiply-add) that rows of `lengths` [B] real tokens need, forward and backward.

    Counts only matrix products that the model needs for real tokens. The last block needs all but keys and values for
    used tokens only, and so do both heads; more is not credited. (The row of a used token is not known here; used
    tokens are assumed to be distributed like the others.) `layers`: blocks that took part, where layer drop is on.
    """
    layers = config.num_hidden_layers if layers is None else layers
    hidden, tokens, rows = config.hidden_size, float(lengths.sum()), lengths.numel()
    used = rows + num_masked
    wide = 3 if config.hidden_act in ("geglu", "swiglu") else 2
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    pairs = {window: visible_pairs(lengths, window) for window in windows}
    *others, last = [pairs[window] / max(tokens, 1) for window in windows]  # keys per query, by layer

    def per_query(keys: float) -> float:
        """FLOPs of its projection, its scores, their product with the values, and what follows attention."""
        return 2 * hidden * hidden + 2 * keys * hidden + wide * hidden * config.intermediate_size

    products = (
        layers * 2 * tokens * hidden * hidden
        + max(layers - 1, 0) * tokens * per_query(statistics.fmean(others or [last]))
        + used * per_query(last) * (layers > 0)
        + num_masked * (hidden * hidden + hidden * config.num_tokens)
    )
    if config.has_sentence_head:
        products += rows * (hidden * hidden + 2 * hidden)
    return 2.0 * PASSES * products


def visible_pairs(lengths: Tensor, window: int) -> float:
    """Pairs of a query and a key that it sees, over rows of `lengths` [B]; window 0: all pairs of a row."""
    lengths = lengths.double()
    reach = (lengths - 1).clamp(max=window // 2) if window else lengths - 1
    return float((lengths + reach * (2 * lengths - reach - 1)).sum())


class MatmulProbe:
    """The two products that dominate the model, [T, H]·[H, I] and [T, H]·[H, H], timed on this rank alone."""

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
        """FLOP/s: the best measurement of about a third of a second, so that a disturbance does not lower it."""
        self.seconds()  # the first call pays for allocations and for choosing kernels
        deadline = self.clock() + MEASURE_SECONDS
        best = self.seconds()
        while self.clock() < deadline:
            best = min(best, self.seconds())
        return self.flops / max(best, 1e-9)

    def measure_pace(self, slowest_speed: float) -> float:
        """Seconds for the same work on every rank: about PACE_SECONDS on the slowest one.

        The median of a few measurements: a disturbance of one does not count, a rank that is always slow does.
        """
        num_times = max(1, round(PACE_SECONDS * slowest_speed / self.flops))
        return statistics.median(self.seconds(num_times) for _ in range(PACE_TURNS))


def measure_speeds(config: BertConfig, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """FLOP/s of the model's products in each precision that this machine supports. Takes about a second."""
    avoid_broken_amx()
    precisions, device = find_abilities().precisions, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        name: MatmulProbe(config, PROBED_TOKENS, dtype, device, clock).measure_speed()
        for name, dtype in DTYPES.items()
        if name in precisions
    }


class RankPace:
    """This rank's seconds for work that is its own and as much on every rank, to find a rank that is slower.

    Without a probe this is the forward pass. The backward pass never qualifies: it reduces gradients, and a fast rank
    waits there for a slow one. At ZeRO stage 3 the forward pass gathers parameters from all ranks, so `probe` is
    measured instead, every PACE_EVERY_SECONDS at most.
    """

    def __init__(self, probe: MatmulProbe | None, slowest_speed: float) -> None:
        self.probe, self.slowest_speed = probe, slowest_speed
        self.last, self.measured_at = 0.0, -math.inf

    def measure(self, seconds: dict[str, float]) -> float:
        """`seconds`: by timer section, of the window that ends now."""
        if self.probe is None:
            return seconds["forward"]
        now = time.monotonic()
        if now - self.measured_at >= PACE_EVERY_SECONDS:
            self.last, self.measured_at = self.probe.measure_pace(self.slowest_speed), now
        return self.last

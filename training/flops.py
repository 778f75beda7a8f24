"""Floating-point operations: how many a batch needs, and how many a second this machine's matmul gives.

B sequences, T real tokens, M masked tokens, U = B + M used tokens, H hidden size, I intermediate size.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from nvidia.config import BertConfig
from nvidia.linear import linear

# Work of one forward and one backward pass, in forwards. Recomputation is not counted: it is not useful work.
PASSES = 3
MOST_TOKENS = 4096  # of the measured product: enough for full speed, short enough for a CPU
MEASURE_SECONDS = 0.3


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


def measure_matmul_speed(
    config: BertConfig,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """This rank's FLOP/s on the two products most of the model's work is: [T, H]·[H, I] and [T, H]·[H, H].

    The best of what fits in about a third of a second, so that a disturbance does not lower the yardstick.
    """
    tokens, hidden = min(num_tokens, MOST_TOKENS), config.hidden_size
    x = torch.randn(tokens, hidden, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
    weights = [torch.ones(size, hidden, dtype=dtype, device=device) for size in (config.intermediate_size, hidden)]

    def run() -> float:
        began = clock()
        for weight in weights:
            linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    run()  # the first call pays for allocations and for choosing kernels
    deadline = clock() + MEASURE_SECONDS
    best = run()
    while clock() < deadline:
        best = min(best, run())
    return 2.0 * tokens * hidden * (config.intermediate_size + hidden) / max(best, 1e-9)

"""Candidates for the same work, timed in turns; and the products of linear layers timed by each library.

The clock counts the processor time of one thread, so that other work on the machine does not decide.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nvidia.cpu import linear

Clock = Callable[[], float]
Work = Callable[[int], object]  # called with the number of the round
Shape = tuple[int, int]  # [O, I] of a weight

MAX_WORK = 1 << 29  # multiplications of one timed call: about 10 ms of one core with AVX-512
ROUNDS = 3
MAX_SECONDS = 0.03  # of two rounds, for a third one
ROUND_ROWS = 16  # fewer in each round: in training, too, every batch has another number of tokens


def time_in_turns(candidates: Mapping[str, Work], clock: Clock) -> dict[str, float]:
    """The seconds of each candidate's fastest turn, on one thread; the first turn includes what happens once."""
    best, threads, began = dict.fromkeys(candidates, math.inf), torch.get_num_threads(), clock()
    torch.set_num_threads(1)
    try:
        for number in range(ROUNDS):
            for name, work in candidates.items():
                start = clock()
                work(number)
                best[name] = min(best[name], clock() - start)
            if number == 1 and clock() - began > MAX_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return best


def time_products(
    shapes: Sequence[Shape], num_tokens: int, clock: Clock = time.thread_time
) -> dict[str, dict[str, float]]:
    """For each kind of product the time by each library, on the largest weight [O, I] that either may compute.

    A kind of product that is always torch's for these shapes and this number of tokens is left out.
    """
    large = [shape for shape in shapes if linear.is_large(num_tokens, *shape)]
    measured = {"forward": large, "input_gradient": large}
    measured["weight_gradient"] = [shape for shape in large if linear.is_narrow(*shape)]
    return {
        role: _time_role(role, max(shapes, key=math.prod), num_tokens, clock)
        for role, shapes in measured.items()
        if shapes
    }


def _time_role(role: str, shape: Shape, num_tokens: int, clock: Clock) -> dict[str, float]:
    tokens = max(ROUND_ROWS * (ROUNDS + 1), min(num_tokens, MAX_WORK // math.prod(shape)))
    weight = torch.full(shape, 0.5)
    x, gradient = (torch.full((tokens, size), 0.5) for size in reversed(shape))

    def run(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Work:
        def work(number: int) -> Tensor:
            rows = tokens - ROUND_ROWS * number
            return product(x[:rows], weight, gradient[:rows])

        return work

    with torch.no_grad():
        return time_in_turns({library: run(product) for library, product in linear.PRODUCTS[role].items()}, clock)

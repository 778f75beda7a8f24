"""Candidates for the same work, timed in turns; and the products of linear layers timed by each library.

The clock counts the processor time of the calling thread, so that other work on the machine does not decide. It counts
waiting for the other threads of a product, which are busy in between.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nvidia.cpu import linear, openblas
from nvidia.cpu.libraries import Library

Clock = Callable[[], float]
Work = Callable[[int], object]  # called with the number of the round
Candidate = TypeVar("Candidate")
Shape = tuple[int, int]  # [O, I] of a weight

MIN_WORK = 1 << 26  # multiplications of the largest product; below that the library hardly matters
# Multiplications of one timed call for each thread: about 15 ms of a core with AVX-512. With half of that, oneDNN's
# gradients of the narrow weights of BERT-base seem as fast as MKL's on an Intel Xeon; in training they take three
# times as long.
MAX_WORK = 1 << 30
SMALL = 64  # rows and columns of a product that starts a library
MIN_ROUNDS, MAX_ROUNDS = 2, 8
MAX_SECONDS = 0.1  # after which there is no other round
SPREAD = 1.1  # between the two fastest turns of every candidate that needs no other turn
HOPELESS = 3.0, 1.5  # times the fastest candidate, after the first round and after others: no further turn
ROUND_ROWS = 16  # fewer in each round: in training, too, every batch has another number of tokens


def time_in_turns(candidates: Mapping[Candidate, Work], clock: Clock) -> dict[Candidate, float]:
    """The seconds of each candidate's fastest turn, on the threads of this process.

    The first turn includes what happens once. Candidates that are far behind take no other turn. If other work
    disturbs the machine, turns differ, and there are more of them.
    """
    turns: dict[Candidate, list[float]] = {name: [] for name in candidates}
    began, left = clock(), list(candidates)
    for number in range(MAX_ROUNDS):
        for name in left:
            start = clock()
            candidates[name](number)
            turns[name] = sorted([*turns[name], clock() - start])
        limit = HOPELESS[number > 0] * min(times[0] for times in turns.values())
        left = [name for name in left if turns[name][0] <= limit]
        if number + 1 >= MIN_ROUNDS:
            agree = all(turns[name][1] <= SPREAD * turns[name][0] for name in left)
            if agree or clock() - began > MAX_SECONDS:
                break
    return {name: times[0] for name, times in turns.items()}


def time_products(
    shapes: Sequence[Shape], num_tokens: int, clock: Clock = time.thread_time
) -> dict[linear.Role, dict[Library, float]]:
    """For each kind of product the time by each library, on the largest weight [O, I] for which there is one.

    Empty if all products are so small that it does not matter. A kind of product that torch alone can compute is left
    out.
    """
    if num_tokens * max(math.prod(shape) for shape in shapes) < MIN_WORK:
        return {}
    narrow = [shape for shape in shapes if linear.weight_role(*shape) == "narrow_weight_gradient"]
    wide = [shape for shape in shapes if shape not in narrow]
    by_role: dict[linear.Role, Sequence[Shape]] = {
        "forward": shapes, "input_gradient": shapes, "weight_gradient": wide, "narrow_weight_gradient": narrow
    }  # fmt: skip
    found = {role: _time_role(role, of_role, num_tokens, clock) for role, of_role in by_role.items() if of_role}
    return {role: times for role, times in found.items() if times}


def _time_role(role: linear.Role, shapes: Sequence[Shape], num_tokens: int, clock: Clock) -> dict[Library, float]:
    libraries: list[Library] = ["torch"]
    if openblas.kernels() is not None:
        libraries.append("openblas")
    for_onednn = [shape for shape in shapes if linear.fits_onednn((num_tokens, *shape))]
    if for_onednn:
        libraries.append("onednn")
    if libraries == ["torch"]:
        return {}
    shape = max(for_onednn or shapes, key=math.prod)
    work = MAX_WORK * torch.get_num_threads()
    tokens = max(ROUND_ROWS * (MAX_ROUNDS + 1), min(num_tokens, work // math.prod(shape)))
    weight = torch.full(shape, 0.5)
    x, gradient = (torch.full((tokens, size), 0.5) for size in reversed(shape))

    def run(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Work:
        def work(number: int) -> Tensor:
            rows = tokens - ROUND_ROWS * number
            return product(x[:rows], weight, gradient[:rows])

        return work

    small = torch.ones(SMALL, SMALL)
    products = {library: linear.PRODUCTS[role][library] for library in libraries}
    with torch.no_grad():
        for product in products.values():
            product(small, small, small)
        products[libraries[1]](x, weight, gradient)  # gets the memory that all of them write to
        return time_in_turns({library: run(product) for library, product in products.items()}, clock)

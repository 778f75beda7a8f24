"""Processes that share the forward passes of one model: each batch is computed by one of them, all get the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True)
class Team:
    """This process among `size` others. `all_ranks_gather` returns the values of all of them, in order.

    `before_round` is called before each round of batches, at the same time on all of them; it may raise to give up.
    """

    rank: int = 0
    size: int = 1
    all_ranks_gather: Callable[[Any], list[Any]] = lambda value: [value]
    before_round: Callable[[], None] = lambda: None

    def all_ranks_map(self, work: Callable[[B], R], batches: Sequence[B]) -> list[R]:
        """`work` of every batch. The batches do not depend on `size`, so neither do the results.

        Every process computes equally many, because partitioned weights are gathered from all of them.
        """
        own = []
        for first in range(0, len(batches), self.size):
            self.before_round()
            own.append(work(batches[min(first + self.rank, len(batches) - 1)]))
        parts = self.all_ranks_gather(own)
        return [parts[number % self.size][number // self.size] for number in range(len(batches))]


ALONE = Team()

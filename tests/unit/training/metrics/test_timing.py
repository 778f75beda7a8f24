"""Seconds by timer section, on a clock that the test controls."""

import pytest
import torch

from training.metrics.timing import SectionTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_sections_add_up_and_a_lap_starts_again() -> None:
    clock = Clock()
    begun: list[str] = []
    timer = SectionTimer(torch.device("cpu"), begun.append, clock)
    sections = (("forward", 1.0), ("backward", 2.0), ("forward", 0.5), ("checkpoint", 4.0))
    for section, seconds in sections:
        with timer.measure(section):
            clock.now += seconds
    assert begun == [section for section, _ in sections]
    clock.now += 0.25
    lap = timer.lap()
    assert (lap["forward"], lap["backward"], lap["checkpoint"], lap["other"]) == (1.5, 2.0, 4.0, 0.25)
    assert lap["total"] == 7.75
    assert lap["training"] == pytest.approx(3.75)  # a checkpoint is not training
    assert timer.lap()["total"] == 0.0

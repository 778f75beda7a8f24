"""Seconds by phase, on a clock that the test turns."""

import pytest
import torch

from training.metrics.timing import SectionTimer, training_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_begin_anew() -> None:
    clock = Clock()
    phases = SectionTimer(torch.device("cpu"), clock)
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("forward", 0.5), ("checkpoint", 4.0)):
        with phases.measure(phase):
            clock.now += seconds
    clock.now += 0.25
    lap = phases.lap()
    assert (lap["forward"], lap["backward"], lap["checkpoint"], lap["other"]) == (1.5, 2.0, 4.0, 0.25)
    assert lap["total"] == 7.75
    assert training_seconds(lap) == pytest.approx(3.75)  # a checkpoint is no training
    assert phases.lap()["total"] == 0.0

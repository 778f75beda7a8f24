"""Spikes stand out from the steps before, and do not become part of their history."""

import math

from training.faults.spikes import MIN_HISTORY_STEPS, SpikeDetector
from training.metrics.window import StepLoss


def steps(*losses: float, first: int = 1) -> list[StepLoss]:
    return [StepLoss(number, 8 * number - 8, 8 * number, loss) for number, loss in enumerate(losses, start=first)]


def test_a_jump_is_found_with_its_samples_and_the_next_one_too() -> None:
    detector = SpikeDetector()
    assert detector.find(steps(*[5.0, 5.1] * (MIN_HISTORY_STEPS // 2))) == []
    found = detector.find(steps(5.2, 7.0, 5.0, math.nan, 7.0, first=31))
    assert [spike.at.step for spike in found] == [32, 35]
    assert str(found[0]) == "loss spike at step 32: 7.000, where the median is 5.100 (samples 248 to 255)"


def test_without_history_there_is_no_spike() -> None:
    assert SpikeDetector().find(steps(*[5.0] * (MIN_HISTORY_STEPS - 1), 50.0)) == []


def test_a_noisy_loss_needs_a_larger_jump() -> None:
    detector = SpikeDetector()
    detector.find(steps(*[4.0, 4.5, 5.0, 5.5, 6.0] * MIN_HISTORY_STEPS))
    assert detector.find(steps(8.0)) == []
    assert len(detector.find(steps(12.0))) == 1

"""Warnings: said when they should be, once, and not on a healthy run."""

import math

import numpy as np
import pytest

from training.health import Health, UnigramLevel

HEALTHY = {
    "loss": 5.0,
    "mlm_loss": 4.4,
    "learning_rate": 1e-3,
    "window_steps": 10.0,
    "seconds_per_step": 1.0,
    "data_wait_share": 0.02,
    "slowest_over_fastest_rank": 1.05,
    "slowest_rank": 1.0,
    "skipped_steps": 9.0,
}


def health_at_unigram_level_5() -> Health:
    health = Health(plateau_from_step=400, batch_rows=32)
    health.unigram.add(np.repeat(np.arange(round(math.exp(5.0))), 200))
    return health


def test_a_healthy_run_hears_nothing() -> None:
    assert health_at_unigram_level_5().check(1000, HEALTHY) == []


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (1000, {"learning_rate": 0.0}, "learning rate is zero"),
        (1000, {"mlm_loss": 4.9}, "unigram level (5.00 nats)"),
        (1000, {"loss_scale": 1.0}, "loss scale has fallen to 1 after 9 skipped steps"),
        (1000, {"data_wait_share": 0.11}, "11% of the time"),
        (1000, {"slowest_over_fastest_rank": 2.0}, "rank 1 takes 2.00 times"),
        (1000, {"loss": math.nan}, "the loss is nan"),
    ],
)
def test_each_warning_is_said_once(step: int, changes: dict[str, float], words: str) -> None:
    health = health_at_unigram_level_5()
    (sentence,) = health.check(step, {**HEALTHY, **changes})
    assert words in sentence
    assert health.check(step + 1, {**HEALTHY, **changes}) == []


def test_the_first_steps_are_no_plateau_and_a_short_window_is_not_judged() -> None:
    health = health_at_unigram_level_5()
    assert health.check(399, {**HEALTHY, "mlm_loss": 8.0}) == []
    assert health.check(500, {**HEALTHY, "data_wait_share": 0.5, "seconds_per_step": 0.1}) == []


def test_unigram_level_is_the_entropy_of_the_labels() -> None:
    level = UnigramLevel()
    level.add(np.array([7] * 10 + [-1] * 5))
    assert level.nats() is None  # too few to say
    level = UnigramLevel()
    level.add(np.array([3] * 30_000 + [-1] * 5))
    level.add(np.array([9] * 10_000))
    assert level.nats() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_parameters_without_gradient() -> None:
    health = health_at_unigram_level_5()
    assert health.without_gradient([]) is None
    assert "cls.seq_relationship" in str(health.without_gradient(["cls.seq_relationship.weight"]))

"""Warnings: given when they should be, once, and not in a healthy run."""

import math

import numpy as np
import pytest

from training.metrics import health as health_module
from training.metrics.health import Health, UnigramLevel, describe_without_gradient

HEALTHY = {
    "loss": 5.0,
    "mlm_loss": 4.4,
    "learning_rate": 1e-3,
    "window_steps": 10.0,
    "seconds_per_step": 1.0,
    "data_wait_share": 0.02,
    "skipped_steps": 9.0,
}


def health_at_unigram_level_5() -> Health:
    health = Health(batch_rows=32)
    health.check(100, HEALTHY)  # the first report after the warm-up
    health.unigram.add(np.repeat(np.arange(round(math.exp(5.0))), 200))
    return health


def test_a_healthy_run_gets_no_warning() -> None:
    assert health_at_unigram_level_5().check(1000, HEALTHY) == []


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (1000, {"learning_rate": 0.0}, "learning rate is zero"),
        (1000, {"mlm_loss": 4.9}, "unigram level (5.00 nats)"),
        (1000, {"loss_scale": 1.0}, "loss scale has fallen to 1 after 9 skipped steps"),
        (1000, {"data_wait_share": 0.11}, "11% of the time"),
        (1000, {"loss": math.nan}, "the loss is nan"),
    ],
)
def test_each_warning_is_given_once(step: int, changes: dict[str, float], words: str) -> None:
    health = health_at_unigram_level_5()
    (sentence,) = health.check(step, {**HEALTHY, **changes})
    assert words in sentence
    assert health.check(step + 1, {**HEALTHY, **changes}) == []


def test_a_slow_rank() -> None:
    health = health_at_unigram_level_5()
    assert health.check(1000, HEALTHY, [4.0, 4.5]) == []
    (sentence,) = health.check(1010, HEALTHY, [4.0, 8.0])
    assert "rank 1 takes 2.00 times" in sentence


def test_neither_the_first_steps_nor_a_loss_far_from_the_level_are_a_plateau() -> None:
    health = health_at_unigram_level_5()
    assert health.check(399, {**HEALTHY, "mlm_loss": 5.0}) == []
    assert health.check(1000, {**HEALTHY, "mlm_loss": 8.0}) == []  # diverged, or still at the start
    assert health.check(400, {**HEALTHY, "mlm_loss": 5.0}) != []


def test_a_plateau_is_counted_from_the_end_of_the_warm_up() -> None:
    health = Health(batch_rows=32)
    health.unigram.add(np.repeat(np.arange(round(math.exp(5.0))), 200))
    stuck = {**HEALTHY, "mlm_loss": 5.0}
    assert health.check(5000, stuck, is_warm=False) == []
    assert health.check(5100, stuck, is_warm=True) == []
    assert health.check(5399, stuck, is_warm=True) == []
    assert "unigram level" in health.check(5400, stuck, is_warm=True)[0]


@pytest.mark.parametrize("steps", [1.0, 100.0])
def test_shares_of_time_are_judged_over_the_same_time_whatever_print_steps_is(steps: float) -> None:
    health = health_at_unigram_level_5()
    figures = {**HEALTHY, "data_wait_share": 0.5, "seconds_per_step": 0.1, "window_steps": steps}
    reports = [health.check(500 + index, figures, [0.01, 0.05]) for index in range(round(110 / steps))]
    assert not any(reports[: int(90 / steps)])
    sentences = [sentence for report in reports for sentence in report]
    assert len(sentences) == 2
    assert "50% of the time" in sentences[0]
    assert "rank 1 takes 5.00 times" in sentences[1]


def test_a_warm_up_begins_at_zero_and_any_later_zero_is_warned_of() -> None:
    still = {**HEALTHY, "learning_rate": 0.0, "window_steps": 1.0}
    health = Health(batch_rows=32, first_step=50)
    assert health.check(51, still) == []
    assert any("learning rate is zero" in sentence for sentence in health.check(52, still))


@pytest.mark.parametrize(
    ("batch_rows", "rate", "num_copies", "words"),
    [
        (256, 1e-4, 1, "It may take more steps"),
        (256, 1e-4, 2, "50% of the rows occurred before"),
        (8, 1e-4, 1, "the batch is small (8 rows per step)"),
        (256, 1e-6, 1, "the learning rate is low (now 1.0e-06)"),
    ],
)
def test_the_cause_of_a_plateau_is_named_where_the_figures_show_it(
    batch_rows: int, rate: float, num_copies: int, words: str
) -> None:
    health = Health(batch_rows=batch_rows, warm_step=100)
    health.unigram.add(np.repeat(np.arange(round(math.exp(5.0))), 200))
    rows = np.random.default_rng(1).integers(5, 60, (40, 24))
    for copy in range(num_copies):
        labels = np.full_like(rows, -1)
        labels[:, 3 + copy] = rows[:, 3 + copy]  # other masks on the same text
        health.repeats.add(0, np.where(labels >= 0, 4, rows), labels)
    health.repeats.add(1, rows, np.full_like(rows, -1))  # the next epoch repeats every row, as it should
    (sentence,) = health.check(1000, {**HEALTHY, "mlm_loss": 5.1, "learning_rate": rate})
    assert words in sentence
    others = {"It may take", "occurred before", "batch is small", "rate is low"} - {words}
    assert sum(other in sentence for other in others) <= 1


def test_unigram_level_is_the_entropy_of_the_labels() -> None:
    level = UnigramLevel()
    level.add(np.array([7] * 10 + [-1] * 5))
    assert level.nats() is None  # too few
    level = UnigramLevel()
    level.add(np.array([3] * 30_000 + [-1] * 5))
    level.add(np.array([9] * 10_000))
    assert level.nats() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_parameters_without_gradient() -> None:
    names = ["cls.seq_relationship.weight", "cls.seq_relationship.bias"]
    assert "2 parameters got no gradient in the first steps: cls.seq_relationship." in describe_without_gradient(names)


def test_counting_ends_when_the_plateau_warning_was_given() -> None:
    health = health_at_unigram_level_5()
    assert health.needs_rows
    assert health.check(1000, {**HEALTHY, "mlm_loss": 4.9}) != []
    assert not health.needs_rows


def test_counting_ends_when_more_rows_would_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "MAX_LABELS", 30)
    monkeypatch.setattr(health_module, "MAX_ROWS", 3)
    health, rows = Health(batch_rows=32), np.arange(5, 29).reshape(2, 12)
    needed = []
    for _ in range(3):
        needed.append(health.needs_rows)
        health.watch_rows(0, rows, rows)
    assert needed == [True, True, True]
    counted = health.unigram.counts.copy()
    assert not health.needs_rows
    health.watch_rows(0, rows, rows)
    assert np.array_equal(health.unigram.counts, counted)
    assert counted.sum() == 48

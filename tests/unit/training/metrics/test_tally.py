"""Figures of a tally: means of what was measured, and nothing else."""

import statistics
from collections import namedtuple

import pytest
import torch

from training.metrics.window import BatchSpread, summarize

SUMS = {
    "masked_lm_loss_sum": 8.0,
    "masked_lm_count": 4.0,
    "masked_lm_correct": 1.0,
    "next_sentence_loss_sum": 3.0,
    "next_sentence_count": 6.0,
    "next_sentence_correct": 3.0,
}


def test_means_per_masked_token_and_per_pair() -> None:
    expected = {"loss": 2.5, "mlm_loss": 2.0, "nsp_loss": 0.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.5}
    assert summarize(SUMS) == expected


def test_without_pairs_there_are_no_figures_of_pairs() -> None:
    without = {**SUMS, "next_sentence_loss_sum": 0.0, "next_sentence_count": 0.0, "next_sentence_correct": 0.0}
    assert summarize(without) == {"loss": 2.0, "mlm_loss": 2.0, "mlm_accuracy": 0.25}


def test_the_standard_error_of_the_mean_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal counts it is that of the batches' means; a batch without masked tokens does not count."""
    monkeypatch.setattr("training.runtime.collectives.all_ranks_sum", lambda values: values)  # one rank
    details = namedtuple("details", ["masked_lm_loss_sum", "masked_lm_count"])
    means = [2.0, 3.0, 2.5, 4.0]
    spread = BatchSpread()
    for mean in means:
        spread.add(details(torch.tensor(10 * mean), torch.tensor(10)))
    spread.add(details(torch.tensor(0.0), torch.tensor(0)))
    assert spread.all_ranks_standard_error() == pytest.approx(statistics.stdev(means) / 2)
    alone = BatchSpread()
    alone.add(details(torch.tensor(20.0), torch.tensor(10)))
    assert alone.all_ranks_standard_error() is None

"""Figures of a tally: means of what was measured, and nothing else."""

from training.metrics.tally import summarize

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

"""Metrics, computed from sums over rows, agree with scikit-learn and with the official scripts' cases."""

import numpy as np
import pytest
from sklearn import metrics as reference

from evaluation.scoring.metrics import (
    best_over_answers,
    entity_counts,
    exact_match,
    make_metric,
    normalized,
    overlap_f1,
)
from evaluation.scoring.significance import compare, holm, summarize

GENERATOR = np.random.default_rng(0)
GOLD, FOUND = GENERATOR.integers(0, 3, (2, 97))
X = GENERATOR.normal(size=97)
Y = X + GENERATOR.normal(size=97)
TAGS = [["B-A", "I-A", "O", "B-B"], ["O", "O"], ["B-A", "B-A", "I-A"]]
GUESSES = [["B-A", "I-A", "O", "B-A"], ["B-B", "O"], ["B-A", "I-A", "I-A"]]
ANSWERS, TEXTS = [["the cat"], [], ["a b", "c d e"]], ["cat", "", "d e"]


@pytest.mark.parametrize(
    ("name", "gold", "found", "expected"),
    [
        ("accuracy", GOLD, FOUND, reference.accuracy_score(GOLD, FOUND)),
        ("macro_f1", GOLD, FOUND, reference.f1_score(GOLD, FOUND, average="macro")),
        ("macro_f1", GOLD % 2, FOUND % 2, reference.f1_score(GOLD % 2, FOUND % 2, average="macro")),
        ("matthews", GOLD, FOUND, reference.matthews_corrcoef(GOLD, FOUND)),
        ("matthews", GOLD, np.ones_like(GOLD), 0.0),
        ("pearson", X, Y, np.corrcoef(X, Y)[0, 1]),
        ("pearson", X, np.ones(97), 0.0),
        ("spearman", X, Y, np.corrcoef(X.argsort().argsort(), Y.argsort().argsort())[0, 1]),
        ("entity_f1", TAGS, GUESSES, 2 * 1 / (4 + 4)),
        ("exact_match", ANSWERS, TEXTS, 2 / 3),
        ("span_f1", ANSWERS, TEXTS, (1 + 1 + 0.8) / 3),
    ],
)
def test_a_metric(name: str, gold: object, found: object, expected: float) -> None:
    assert make_metric(name, num_labels=3).value(gold, found) == pytest.approx(expected)


def test_constant_predictions_have_no_correlation() -> None:
    for name in ("pearson", "spearman"):
        assert make_metric(name).value(X, np.full(97, 0.1)) == 0.0  # the mean of which is not exactly 0.1


def test_f1_is_of_the_positive_class() -> None:
    gold, found = GOLD % 2, FOUND % 2
    for positive in (0, 1):
        expected = reference.f1_score(gold, found, pos_label=positive)
        assert make_metric("f1", 2, positive).value(gold, found) == pytest.approx(expected)


def test_entities_count_only_with_type_and_both_ends() -> None:
    assert entity_counts(TAGS, GUESSES).tolist() == [[1, 2, 2], [0, 1, 0], [0, 1, 2]]
    assert entity_counts([["B-A", "I-A"]], [["I-A", "I-A"]]).tolist() == [[1, 1, 1]]  # as conlleval has it


def test_squad_normalization() -> None:
    assert normalized("The  Cat, an A-Team!") == "cat ateam"
    assert exact_match("a cat.", "the Cat") == 1
    assert overlap_f1("", "") == 1
    assert overlap_f1("x", "the") == 0
    assert best_over_answers(exact_match, "", ["the"]) == 1  # an answer that normalizes to nothing does not count


def test_an_interval_covers_seeds_and_rows() -> None:
    metric = make_metric("accuracy")
    gold = np.zeros(400, dtype=int)
    runs = [(np.arange(400) % 10 < wrong).astype(int) for wrong in (1, 2, 3)]
    summary = summarize(metric, [metric.parts(gold, run) for run in runs])
    assert summary.mean == pytest.approx(0.8)
    assert summary.std == pytest.approx(0.1)
    assert 0.7 < summary.low < 0.76 < 0.84 < summary.high < 0.9
    alone = summarize(metric, [metric.parts(gold, runs[0])])
    assert alone.std is None
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * (0.09 / 400) ** 0.5, rel=0.15)  # as the binomial has it


def test_a_class_that_a_resample_lacks_does_not_count_as_wrong() -> None:
    gold = np.arange(6) % 2
    metric = make_metric("macro_f1")
    assert summarize(metric, [metric.parts(gold, gold)])[:3] == (1.0, None, 1.0)


def test_the_paired_test_finds_what_is_there_and_nothing_else() -> None:
    metric = make_metric("accuracy")
    generator = np.random.default_rng(1)
    gold = np.zeros(300, dtype=int)
    base = (generator.random(300) < 0.3).astype(int)
    better = base.copy()
    better[np.flatnonzero(base)[:20]] = 0
    alike = base.copy()
    alike[np.flatnonzero(base)[:5]] = 0
    alike[np.flatnonzero(base == 0)[:5]] = 1
    parts = [metric.parts(gold, run) for run in (base, better, alike)]
    gain = compare(metric, [parts[0]], [parts[1]])
    assert gain.difference == pytest.approx(20 / 300)
    assert gain.low > 0
    assert gain.p_value < 0.001
    none = compare(metric, [parts[0]], [parts[2]])
    assert none.difference == 0
    assert none.p_value == 1


def test_holm_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])

"""Metrics as the field reports them, each also as sums over rows, which resampling needs.

N rows, K sums of a metric, R resamples. A metric is a function of the sums of K numbers per row, so that a resample is
a matrix product instead of a second pass over the predictions.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nervaluate.loaders import ListLoader
from nervaluate.strategies import StrictEvaluation
from scipy import stats
from sklearn import metrics as sklearn_metrics

Array = np.ndarray


@dataclass(frozen=True)
class Metric:
    """`value` of gold and predictions; `parts` [N, K] and `of_sums` [..., K] → [...] give the same from sums."""

    name: str
    value: Callable[[Any, Any], float]
    parts: Callable[[Any, Any], Array]
    of_sums: Callable[[Array], Array]


def make_metric(name: str, num_labels: int = 2, positive: int = 1) -> Metric:
    """The metric `name`; `positive` is the class that "f1" is of."""
    if name in ("accuracy", "accuracy_of_mean", "reciprocal_rank", "exact_match", "span_f1"):
        return _mean_metric(name)
    if name == "f1":
        return Metric(
            name,
            lambda gold, found: float(sklearn_metrics.f1_score(gold, found, pos_label=positive, zero_division=0)),
            lambda gold, found: _hits(gold, found, [positive]),
            lambda sums: _f1(sums.reshape(*sums.shape[:-1], 1, 3))[..., 0],
        )
    if name == "macro_f1":
        classes = list(range(num_labels))
        return Metric(
            name,
            lambda gold, found: float(
                sklearn_metrics.f1_score(gold, found, labels=classes, average="macro", zero_division=0)
            ),
            lambda gold, found: _hits(gold, found, classes),
            lambda sums: _f1(sums.reshape(*sums.shape[:-1], num_labels, 3)).mean(-1),
        )
    if name == "matthews":
        return Metric(
            name,
            lambda gold, found: float(sklearn_metrics.matthews_corrcoef(gold, found)),
            lambda gold, found: np.eye(num_labels**2)[np.asarray(gold) * num_labels + np.asarray(found)],
            lambda sums: _matthews(sums.reshape(*sums.shape[:-1], num_labels, num_labels)),
        )
    if name in ("pearson", "spearman"):
        ranked = name == "spearman"
        return Metric(
            name,
            lambda gold, found: _correlation(gold, found, ranked),
            lambda gold, found: _moments(gold, found, ranked),
            _pearson_of_moments,
        )
    assert name == "entity_f1", name
    return Metric(
        name, lambda gold, found: float(_entity_f1(entity_counts(gold, found).sum(0))), entity_counts, _entity_f1
    )


def _mean_metric(name: str) -> Metric:
    def per_row(gold: Any, found: Any) -> Array:
        if name in ("accuracy", "accuracy_of_mean", "reciprocal_rank"):
            # Zero-shot results are judged row by row already: gold is None and `found` holds the values.
            return np.asarray(found, float) if gold is None else (np.asarray(gold) == np.asarray(found)).astype(float)
        judge = exact_match if name == "exact_match" else overlap_f1
        return np.array([best_over_answers(judge, text, answers) for answers, text in zip(gold, found, strict=True)])

    return Metric(
        name,
        lambda gold, found: float(per_row(gold, found).mean()),
        lambda gold, found: np.stack([values := per_row(gold, found), np.ones_like(values)], axis=1),
        lambda sums: sums[..., 0] / sums[..., 1],
    )


def _hits(gold: Any, found: Any, classes: Sequence[int]) -> Array:
    """[N, 3·C]: true positives, predicted and gold members of each class."""
    gold, found = np.asarray(gold), np.asarray(found)
    columns = [part for c in classes for part in ((gold == c) & (found == c), found == c, gold == c)]
    return np.stack(columns, axis=1).astype(float)


def _f1(hits: Array) -> Array:
    """[..., 3] of true positives, predicted, gold → [...]; 0 where a class does not occur at all."""
    total = hits[..., 1] + hits[..., 2]
    return np.divide(2 * hits[..., 0], total, out=np.zeros_like(total), where=total > 0)


def _matthews(confusion: Array) -> Array:
    """[..., C, C] → [...]; 0 where gold or predictions have one class only, as in scikit-learn."""
    total = confusion.sum((-1, -2))
    right = np.trace(confusion, axis1=-2, axis2=-1)
    gold, found = confusion.sum(-1), confusion.sum(-2)
    covariance = right * total - (gold * found).sum(-1)
    scale = np.sqrt((total**2 - (gold**2).sum(-1)) * (total**2 - (found**2).sum(-1)))
    return np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)


def _correlation(gold: Any, found: Any, ranked: bool) -> float:
    gold, found = np.asarray(gold, float), np.asarray(found, float)
    if np.ptp(found) == 0 or not np.isfinite(found).all():
        return 0.0  # undefined; the run counts as collapsed
    return float((stats.spearmanr if ranked else stats.pearsonr)(gold, found).statistic)


def _moments(gold: Any, found: Any, ranked: bool) -> Array:
    x, y = np.asarray(gold, float), np.nan_to_num(np.asarray(found, float))
    if ranked:
        x, y = stats.rankdata(x), stats.rankdata(y)
    x, y = x - x.mean(), y - y.mean()  # sums of squares of large numbers lose digits
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson_of_moments(sums: Array) -> Array:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    scale = np.sqrt(np.maximum((n * xx - x * x) * (n * yy - y * y), 0))
    return np.divide(n * xy - x * y, scale, out=np.zeros_like(scale), where=scale > 0)


def entity_counts(gold: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> Array:
    """[N, 3]: entities that match in type and both ends, predicted entities, gold entities."""
    loader, strict = ListLoader(), StrictEvaluation()
    true = loader.load([list(tags) for tags in gold])
    predicted = loader.load([list(tags) for tags in found])
    counts = []
    for true_row, found_row in zip(true, predicted, strict=True):
        result, _ = strict.evaluate(true_row, found_row, [])
        counts.append((result.correct, len(found_row), len(true_row)))
    return np.array(counts, dtype=float).reshape(-1, 3)


def _entity_f1(sums: Array) -> Array:
    return _f1(np.asarray(sums, float))


_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """SQuAD's own: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(found: str, answer: str) -> float:
    return float(normalized(found) == normalized(answer))


def overlap_f1(found: str, answer: str) -> float:
    """F1 of the bags of words; where one of them is empty, whether both are."""
    found_words, answer_words = normalized(found).split(), normalized(answer).split()
    if not found_words or not answer_words:
        return float(found_words == answer_words)
    shared = sum((collections.Counter(found_words) & collections.Counter(answer_words)).values())
    return 2 * shared / (len(found_words) + len(answer_words))


def best_over_answers(judge: Callable[[str, str], float], found: str, answers: Sequence[str]) -> float:
    """A question without an answer wants an empty text; answers that normalize to nothing do not count."""
    usable = [answer for answer in answers if normalized(answer)] or [""]
    return max(judge(found, answer) for answer in usable)

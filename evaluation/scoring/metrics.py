"""Metrics as the field reports them, each also as sums over rows, which resampling needs.

N rows, K sums of a metric, R resamples. A metric is a function of the sums of K numbers per row, so that a resample is
a matrix product instead of a second pass over the predictions.
"""

import collections
import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from nervaluate.loaders import ListLoader
from nervaluate.strategies import StrictEvaluation
from scipy import stats

Array = np.ndarray


@dataclass(frozen=True)
class Metric:
    """`per_row` gives numbers [N, K] for gold and predictions, `of_sums` [..., K] → [...] the metric of their sums."""

    name: str
    per_row: Callable[[Any, Any], Array]
    of_sums: Callable[[Array], Array]

    def parts(self, gold: Any, found: Any) -> Array:
        """The numbers of each row [N, K]. Results of zero-shot tasks are values by metric."""
        return self.per_row(gold, found[self.name] if isinstance(found, dict) else found)

    def value(self, gold: Any, found: Any) -> float:
        return float(self.of_sums(self.parts(gold, found).sum(0)))


def make_metric(name: str, num_labels: int = 2, positive: int = 1) -> Metric:
    """The metric `name`; `positive` is the class that "f1" is of."""
    kinds: dict[str, tuple[Callable[[Any, Any], Array], Callable[[Array], Array]]] = {
        **dict.fromkeys(("accuracy", "accuracy_of_mean", "reciprocal_rank"), (_matches, _mean)),
        "exact_match": (partial(_judge_texts, exact_match), _mean),
        "span_f1": (partial(_judge_texts, overlap_f1), _mean),
        "f1": (partial(_hits, [positive]), _mean_f1),
        "macro_f1": (partial(_hits, range(num_labels)), _mean_f1),
        "entity_f1": (entity_counts, _mean_f1),
        "matthews": (partial(_confusion, num_labels), _matthews),
        "pearson": (_moments, _pearson),
        "spearman": (lambda gold, found: _moments(stats.rankdata(gold), stats.rankdata(found)), _pearson),
    }
    return Metric(name, *kinds[name])


def _matches(gold: Any, found: Any) -> Array:
    """Zero-shot results are judged row by row already: gold is None and `found` holds the values."""
    return _counted(np.asarray(found, float) if gold is None else (np.asarray(gold) == np.asarray(found)).astype(float))


def _judge_texts(judge: Callable[[str, str], float], gold: Any, found: Any) -> Array:
    return _counted(
        np.array([best_over_answers(judge, text, answers) for answers, text in zip(gold, found, strict=True)])
    )


def _counted(values: Array) -> Array:
    return np.stack([values, np.ones_like(values)], axis=1)


def _mean(sums: Array) -> Array:
    return sums[..., 0] / sums[..., 1]


def _hits(classes: Sequence[int], gold: Any, found: Any) -> Array:
    """[N, 3·C]: true positives, predicted and gold members of each class."""
    gold, found = np.asarray(gold), np.asarray(found)
    columns = [part for c in classes for part in ((gold == c) & (found == c), found == c, gold == c)]
    return np.stack(columns, axis=1).astype(float)


def _mean_f1(sums: Array) -> Array:
    """[..., 3·C] of true positives, predicted, gold → [...]: the mean over the classes that occur, 0 if none does."""
    right, predicted, gold = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
    total = predicted + gold
    scores = np.divide(2 * right, total, out=np.zeros_like(total), where=total > 0)
    return scores.sum(-1) / np.maximum((total > 0).sum(-1), 1)


def _confusion(num_labels: int, gold: Any, found: Any) -> Array:
    """[N, C·C]"""
    return np.eye(num_labels**2)[np.asarray(gold) * num_labels + np.asarray(found)]


def _matthews(sums: Array) -> Array:
    """[..., C·C] → [...]; 0 where gold or predictions have one class only, as in scikit-learn."""
    num_labels = math.isqrt(sums.shape[-1])
    confusion = sums.reshape(*sums.shape[:-1], num_labels, num_labels)
    total = confusion.sum((-1, -2))
    right = np.trace(confusion, axis1=-2, axis2=-1)
    gold, found = confusion.sum(-1), confusion.sum(-2)
    covariance = right * total - (gold * found).sum(-1)
    scale = np.sqrt((total**2 - (gold**2).sum(-1)) * (total**2 - (found**2).sum(-1)))
    return np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)


def _moments(gold: Any, found: Any) -> Array:
    # Sums of squares of large numbers would lose digits. Equal values become exactly 0, so their variance does too.
    x, y = (np.asarray(values, float) - np.median(values) for values in (gold, found))
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: Array) -> Array:
    """The correlation from moments; 0 where one side is constant."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    scale = np.sqrt(np.maximum((n * xx - x * x) * (n * yy - y * y), 0))
    return np.divide(n * xy - x * y, scale, out=np.zeros_like(scale), where=scale > 0)


def entity_counts(gold: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> Array:
    """[N, 3]: entities that match in type and both ends, predicted entities, gold entities."""
    true, predicted = (ListLoader().load([list(tags) for tags in rows]) for rows in (gold, found))
    counts = [
        (StrictEvaluation().evaluate(true_row, found_row, [])[0].correct, len(found_row), len(true_row))
        for true_row, found_row in zip(true, predicted, strict=True)
    ]
    return np.array(counts, dtype=float).reshape(-1, 3)


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

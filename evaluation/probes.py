"""Probes: quick measures of a model in memory, without fine-tuning. Every one is deterministic.

N rows, H hidden size.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from evaluation.pseudo_likelihood.encoding import encode
from evaluation.pseudo_likelihood.minimal_pairs import minimal_pair_accuracy
from evaluation.pseudo_likelihood.native import PackedScorer, mean_states

__all__ = [
    "PackedScorer",
    "cosine_similarities",
    "logistic_predictions",
    "logistic_probe",
    "minimal_pair_accuracy",
    "nearest_neighbour_accuracy",
    "pooled_features",
    "similarity_correlation",
]


def pooled_features(model: Any, tokenizer: Any, texts: Sequence[str], max_tokens: int = 128) -> Tensor:
    """[N, H] mean final states of our model on texts, each cut to `max_tokens`."""
    return mean_states(model, [sentence.shortened(max_tokens).ids for sentence in encode(tokenizer, texts)])


def logistic_predictions(
    train: Tensor, train_labels: Sequence[int] | np.ndarray, dev: Tensor, strength: float = 1.0
) -> np.ndarray:
    """[N] classes of `dev` by logistic regression on frozen features [N, H]. `strength`: inverse regularization."""
    labels = np.asarray(train_labels)
    if len(np.unique(labels)) == 1:
        return np.full(len(dev), labels[0])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the same after 300 iterations for every model
        classifier.fit(train.numpy(), labels)
    return classifier.predict(dev.numpy())


def logistic_probe(
    train: Tensor, train_labels: Sequence[int], dev: Tensor, dev_labels: Sequence[int], strength: float = 1.0
) -> float:
    """Accuracy on `dev` of logistic_predictions()."""
    return float((logistic_predictions(train, train_labels, dev, strength) == np.asarray(dev_labels)).mean())


def cosine_similarities(first: Tensor, second: Tensor) -> np.ndarray:
    """[N] of two sets of features [N, H], row by row."""
    return torch.nn.functional.cosine_similarity(first, second).numpy()


def similarity_correlation(first: Tensor, second: Tensor, scores: Sequence[float]) -> float:
    """Spearman's correlation of cosine similarities with scores that people gave; 0 where it is undefined."""
    similarities = cosine_similarities(first, second)
    if np.ptp(similarities) == 0 or np.ptp(scores) == 0 or not np.isfinite(similarities).all():
        return 0.0
    return float(stats.spearmanr(similarities, np.asarray(scores)).statistic)


def nearest_neighbour_accuracy(first: Tensor, second: Tensor) -> float:
    """Share of rows of `first` whose nearest row of `second`, by cosine, is the one of the same number.

    Features are centred before, because the states of encoders share a large common part.
    """
    if not len(first):
        return float("nan")
    normed = [torch.nn.functional.normalize(part - part.mean(0), dim=1) for part in (first, second)]
    nearest = (normed[0] @ normed[1].T).argmax(1)
    return float((nearest == torch.arange(len(first))).float().mean())

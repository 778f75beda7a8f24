"""Probes: quick measures of a model in memory, without fine-tuning. Every one is deterministic.

Functions for any texts, and the probes of tasks, which training runs call: rows in a fixed order, of which the first
ones are scored. A probe first computes on all processes of a team, then one of them judges what was computed.

N rows, H hidden size.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from common.errors import UserError
from evaluation.pseudo_likelihood.likelihood import Encoded, Masking, Scorer, Team, encode, mask_id_of, score_sentences
from evaluation.pseudo_likelihood.minimal_pairs import fill_gap, preferred, score_cloze, score_pairs
from evaluation.pseudo_likelihood.native import PackedScorer, mean_states
from evaluation.scoring.scores import metrics_of
from evaluation.tasks.readers import Row
from evaluation.tasks.task import Task
from evaluation.tasks.task_data import TaskData, fixed_order

MIN_UNITS = 32  # the figure of fewer would be chance
MAX_ROWS = 3000  # the standard error of an accuracy is at most 1.6 points with 1,000 rows
MAX_TRAIN_PER_ROW = 4  # rows that the regression learns from, for each row that it is scored on
NEAREST = "_nearest"


def minimal_pair_accuracy(
    scorer: Scorer, tokenizer: Any, pairs: Sequence[tuple[str, str]], masking: Masking = "token"
) -> float:
    """Share of pairs whose good sentence is the more probable one."""
    return score_pairs(scorer, tokenizer, pairs, masking=masking).accuracy


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


def probe_names(task: Task) -> list[str]:
    """The names of a task's figures."""
    return [task.name, *([f"{task.name}{NEAREST}"] if task.kind == "pair" and task.positive else [])]


def check_kind(task: Task) -> None:
    """Refuse tasks that only a fine-tuned model can do."""
    if task.kind in ("tokens", "span") or (task.kind == "regress" and "text_pair" not in task.columns):
        raise UserError(
            f'--probe {task.name}: its kind "{task.kind}" needs a fine-tuned model; expected minimal pairs, cloze, '
            f"classes of texts or of pairs of texts, or scores of pairs. Evaluate it after the run: python -m "
            f"evaluation.run --tasks {task.name}"
        )


class Probe(ABC):
    """The rows of one task, encoded. `costs` are the tokens in forward passes of each unit of rows, in order."""

    unit: ClassVar[str] = "row"  # that figures are of

    def __init__(self, task: Task, tokenizer: Any, max_positions: int) -> None:
        self.task, self.tokenizer, self.max_positions = task, tokenizer, max_positions
        self.num_shortened = 0  # texts that are longer than the limit, and cut
        self.costs = np.zeros(0)

    @property
    def num_units(self) -> int:
        return len(self.costs)

    def units_for(self, num_tokens: float) -> int:
        """How many units can be computed in forward passes of `num_tokens`, but at least MIN_UNITS."""
        fitting = int(np.searchsorted(np.cumsum(self.costs), num_tokens, side="right"))
        return min(self.num_units, max(MIN_UNITS, fitting))

    @abstractmethod
    def compute(self, model: Any, num_units: int, team: Team) -> Any:
        """What the figures of the first units follow from. A collective of `team`."""

    @abstractmethod
    def judge(self, computed: Any, num_units: int) -> dict[str, float]:
        """The figures, by name."""

    def _encode(self, texts: Sequence[str], limit: int) -> list[Encoded]:
        encoded = encode(self.tokenizer, texts)
        self.num_shortened += sum(len(item.ids) > limit for item in encoded)
        return [item.shortened(limit) for item in encoded]

    def _scorer(self, model: Any, team: Team) -> PackedScorer:
        return PackedScorer(model, self.tokenizer.pad_id, team=team, head_rows=None)


class MinimalPairs(Probe):
    unit = "pair"

    def __init__(self, data: TaskData, tokenizer: Any, max_positions: int) -> None:
        super().__init__(data.task, tokenizer, max_positions)
        rows = _some(next(iter(data.dev.values())), "group", MAX_ROWS)
        self.sentences = self._encode([row[field] for row in rows for field in ("good", "bad")], max_positions)
        tokens = np.array([len(item.ids) * sum(word is not None for word in item.words) for item in self.sentences])
        self.costs = tokens.reshape(-1, 2).sum(1)

    def compute(self, model: Any, num_units: int, team: Team) -> np.ndarray:
        chosen = self.sentences[: 2 * num_units]
        return score_sentences(self._scorer(model, team), chosen, mask_id_of(self.tokenizer)).sums.reshape(-1, 2)

    def judge(self, computed: np.ndarray, num_units: int) -> dict[str, float]:
        value = float(preferred(computed).mean()) if np.isfinite(computed).all() else np.nan
        return {self.task.name: value}


class Cloze(Probe):
    def __init__(self, data: TaskData, tokenizer: Any, max_positions: int) -> None:
        super().__init__(data.task, tokenizer, max_positions)
        self.rows = _some(next(iter(data.dev.values())), "group", MAX_ROWS)
        filled = [fill_gap(tokenizer, row, max_positions) for row in self.rows]
        self.num_shortened = sum(row.was_cut for row in filled)
        self.costs = np.array([sum(len(item.ids) for item, _ in row.copies) for row in filled])

    def compute(self, model: Any, num_units: int, team: Team) -> np.ndarray:
        scorer, rows = self._scorer(model, team), self.rows[:num_units]
        return score_cloze(scorer, self.tokenizer, rows, max_positions=self.max_positions).correct

    def judge(self, computed: np.ndarray, num_units: int) -> dict[str, float]:
        return {self.task.name: float(computed.mean())}


class Labelled(Probe):
    """Texts or pairs of texts: logistic regression on mean final states, which never change the model."""

    def __init__(self, data: TaskData, tokenizer: Any, max_positions: int) -> None:
        super().__init__(data.task, tokenizer, max_positions)
        self.labels, self.fields = data.labels, [name for name in ("text", "text_pair") if name in data.task.columns]
        dev = next(iter(data.dev.values()))
        if data.task.kind == "regress":  # the cosine of a pair needs nothing to learn from
            self.train_per_unit, rows = 0, _some(dev, None, MAX_ROWS)
        else:
            self.train_per_unit = per_unit = max(1, min(MAX_TRAIN_PER_ROW, len(data.train) // len(dev)))
            units = min(len(dev), len(data.train) // per_unit, MAX_ROWS // (per_unit + 1))
            train, scored = _some(data.train, "label", units * per_unit), _some(dev, "label", units)
            parts = [[*train[i * per_unit : (i + 1) * per_unit], scored[i]] for i in range(units)]
            rows = [row for part in parts for row in part]
        self.gold = [row["label"] for row in rows]
        limit = min(max_positions, data.task.max_length)
        texts = [row[field] for row in rows for field in self.fields]
        self.ids = [item.ids for item in self._encode(texts, limit)]
        self.costs = np.array([len(ids) for ids in self.ids]).reshape(-1, self._texts_per_unit).sum(1)

    @property
    def _texts_per_unit(self) -> int:
        return (self.train_per_unit + 1) * len(self.fields)

    def compute(self, model: Any, num_units: int, team: Team) -> Tensor:
        return mean_states(model, self.ids[: num_units * self._texts_per_unit], team=team)  # [texts, H]

    def judge(self, computed: Tensor, num_units: int) -> dict[str, float]:
        name = self.task.name
        if not computed.isfinite().all():
            return dict.fromkeys(probe_names(self.task), np.nan)
        states = [computed[place :: len(self.fields)] for place in range(len(self.fields))]  # of each row's texts
        gold = np.array(self.gold[: len(states[0])])
        if not self.train_per_unit:
            return {name: similarity_correlation(states[0], states[1], gold.tolist())}
        is_scored = np.arange(len(gold)) % (self.train_per_unit + 1) == self.train_per_unit
        features = states[0] if len(states) == 1 else _pair_features(*states)
        learned, scored = torch.from_numpy(~is_scored), torch.from_numpy(is_scored)
        found = logistic_predictions(features[learned], gold[~is_scored], features[scored], strength=0.1)
        metric = metrics_of(self.task, len(self.labels))[self.task.main_metric]
        figures = {name: metric.value(gold[is_scored].tolist(), found.tolist())}
        if f"{name}{NEAREST}" in probe_names(self.task):
            assert self.task.positive is not None
            related = scored & torch.from_numpy(gold == self.labels.index(self.task.positive))
            figures[f"{name}{NEAREST}"] = nearest_neighbour_accuracy(*(part[related] for part in states))
        return figures


KINDS: Mapping[str, Callable[[TaskData, Any, int], Probe]] = {"minimal_pairs": MinimalPairs, "cloze": Cloze}


def build_probe(data: TaskData, tokenizer: Any, max_positions: int) -> Probe:
    """`tokenizer` is ours. Raises UserError for rows that cannot be scored."""
    check_kind(data.task)
    try:
        return KINDS.get(data.task.kind, Labelled)(data, tokenizer, max_positions)
    except UserError as error:
        raise UserError(f"--probe {data.task.name}: {error}") from None


def _some(rows: list[Row], stratum: str | None, limit: int) -> list[Row]:
    """At most `limit` rows in a fixed random order in which every prefix has the strata in about their shares."""
    return [rows[number] for number in fixed_order(rows, stratum)[:limit]]


def _pair_features(first: Tensor, second: Tensor) -> Tensor:
    """[N, 2·H + 1]: what two texts differ in, what they share, and their cosine."""
    cosine = torch.from_numpy(cosine_similarities(first, second))
    return torch.cat([(first - second).abs(), first * second, cosine[:, None]], dim=1)

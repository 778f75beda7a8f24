"""Pseudo-log-likelihood: how probable a masked language model finds a sentence.

Each token is masked in turn and the log-probabilities of the true tokens are summed (Salazar et al., 2020). A sum
favours words that the tokenizer keeps whole, because later pieces of a word are easy to guess from the earlier ones;
the masking "word" hides all pieces of a word together and "word_l2r" a piece and those after it (Kauf and Ivanova,
2023).

N sentences, Q masked inputs, E entries: a token that is wanted at a position of an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from evaluation.pseudo_likelihood.encoding import Encoded

Masking = Literal["token", "word", "word_l2r"]
Array = np.ndarray


class Queries(NamedTuple):
    """Masked inputs, each of them once, and the tokens whose log-probabilities are wanted."""

    inputs: list[tuple[int, ...]]  # Q
    input_of: Array  # [E] which input
    positions: Array  # [E] where in it
    targets: Array  # [E] token id
    owners: Array  # [E] which sentence the entry belongs to


class Answers(NamedTuple):
    log_probs: Array  # [E] float32
    ranks: Array | None  # [E] 1 = no token is more probable; only on request


class Scorer(Protocol):
    """A masked language model that fills in masks."""

    def answer(self, queries: Queries, with_ranks: bool = False) -> Answers: ...


@dataclass(frozen=True)
class SentenceScores:
    sums: Array  # [N] float64
    num_tokens: Array  # [N] tokens that were scored

    @property
    def means(self) -> Array:
        return self.sums / np.maximum(self.num_tokens, 1)


def score_sentences(
    scorer: Scorer, sentences: Sequence[Encoded], mask_id: int, masking: Masking = "token"
) -> SentenceScores:
    """Pseudo-log-likelihood of each sentence, in nats."""
    queries = make_queries([(sentence, _targets(sentence, masking)) for sentence in sentences], mask_id)
    log_probs = scorer.answer(queries).log_probs.astype(np.float64)
    sums = np.bincount(queries.owners, weights=log_probs, minlength=len(sentences))
    return SentenceScores(sums, np.bincount(queries.owners, minlength=len(sentences)))


def _targets(sentence: Encoded, masking: Masking) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each masked copy of a sentence: the positions that are hidden, and those of them that are scored."""
    free = [position for position, word in enumerate(sentence.words) if word is not None]
    if masking == "token":
        return [((position,), (position,)) for position in free]
    words: dict[int | None, list[int]] = {}
    for position in free:
        words.setdefault(sentence.words[position], []).append(position)
    if masking == "word":
        return [(tuple(places), tuple(places)) for places in words.values()]
    return [(tuple(places[i:]), (places[i],)) for places in words.values() for i in range(len(places))]


def make_queries(
    wanted: Sequence[tuple[Encoded, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]], mask_id: int
) -> Queries:
    """Masked copies of sentences; copies that are equal, such as those of a pair at its only difference, are one."""
    numbers: dict[tuple[int, ...], int] = {}
    entries: list[tuple[int, int, int, int]] = []
    for owner, (sentence, copies) in enumerate(wanted):
        for hidden, scored in copies:
            masked = list(sentence.ids)
            for position in hidden:
                masked[position] = mask_id
            number = numbers.setdefault(tuple(masked), len(numbers))
            entries += [(number, position, sentence.ids[position], owner) for position in scored]
    columns = np.array(entries, dtype=np.int64).reshape(-1, 4).T
    return Queries(list(numbers), *columns)


class Batch(NamedTuple):
    """Some of the inputs, padded, and the entries that belong to them."""

    ids: Tensor  # [B, S]
    mask: Tensor  # [B, S] bool, true on real tokens
    rows: Tensor  # [e] which row of the batch an entry is in
    positions: Tensor  # [e]
    targets: Tensor  # [e]
    entries: Array  # [e] their numbers


def make_batch(queries: Queries, chosen: Array, entries: Array, pad_id: int) -> Batch:
    """`chosen`: numbers of inputs; `entries`: numbers of all entries of these inputs."""
    inputs = [queries.inputs[number] for number in chosen]
    lengths = np.array([len(ids) for ids in inputs])
    real = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = np.concatenate([np.asarray(item) for item in inputs])
    row_of = {int(number): row for row, number in enumerate(chosen)}
    rows = [row_of[number] for number in queries.input_of[entries].tolist()]
    positions, targets = (torch.from_numpy(values[entries]) for values in (queries.positions, queries.targets))
    return Batch(torch.from_numpy(ids), torch.from_numpy(real), torch.tensor(rows), positions, targets, entries)


def entries_by_input(queries: Queries) -> tuple[Array, Array]:
    """(order, starts): the entries of input q are order[starts[q] : starts[q + 1]]."""
    order = np.argsort(queries.input_of, kind="stable")
    return order, np.searchsorted(queries.input_of[order], np.arange(len(queries.inputs) + 1))


class StockScorer:
    """Any AutoModelForMaskedLM: padded batches, scores of every token at every position."""

    def __init__(self, model: Any, pad_id: int, batch_size: int = 64) -> None:
        self.model, self.pad_id, self.batch_size = model.eval(), pad_id, batch_size

    @torch.inference_mode()
    def answer(self, queries: Queries, with_ranks: bool = False) -> Answers:
        log_probs, ranks = empty_answers(queries, with_ranks)
        order, starts = entries_by_input(queries)
        device = next(self.model.parameters()).device
        for first in range(0, len(queries.inputs), self.batch_size):
            chosen = np.arange(first, min(first + self.batch_size, len(queries.inputs)))
            batch = make_batch(queries, chosen, order[starts[first] : starts[chosen[-1] + 1]], self.pad_id)
            output = self.model(input_ids=batch.ids.to(device), attention_mask=batch.mask.long().to(device))
            scores = output.logits[batch.rows.to(device), batch.positions.to(device)].float()  # [e, tokens]
            put_answers(log_probs, ranks, batch.entries, scores, batch.targets.to(device))
        return Answers(log_probs, ranks)


def empty_answers(queries: Queries, with_ranks: bool) -> tuple[Array, Array | None]:
    size = len(queries.targets)
    return np.empty(size, dtype=np.float32), np.empty(size, dtype=np.int64) if with_ranks else None


def put_answers(log_probs: Array, ranks: Array | None, entries: Array, scores: Tensor, targets: Tensor) -> None:
    """Log-probabilities (and ranks) of `targets` [e] under fp32 `scores` [e, tokens] to their places."""
    at_target = scores.gather(1, targets[:, None]).squeeze(1)
    log_probs[entries] = (at_target - scores.logsumexp(1)).cpu().numpy()
    if ranks is not None:
        ranks[entries] = (1 + (scores > at_target[:, None]).sum(1)).cpu().numpy()

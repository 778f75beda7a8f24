"""Pseudo-log-likelihood: how probable a masked language model finds a sentence.

Each token is masked in turn and the log-probabilities of the true tokens are summed (Salazar et al., 2020). A sum
favours words that the tokenizer keeps whole, because later pieces of a word are easy to guess from the earlier ones;
the masking "word" hides all pieces of a word together and "word_l2r" a piece and those after it (Kauf and Ivanova,
2023).

N sentences, Q masked inputs, E entries: a token that is wanted at a position of an input.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError

Masking = Literal["token", "word", "word_l2r"]
Array = np.ndarray
B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True)
class Encoded:
    """One sentence with its special tokens."""

    ids: tuple[int, ...]
    words: tuple[int | None, ...]  # number of the word that a token belongs to; None for special tokens
    offsets: tuple[tuple[int, int], ...]  # characters [start, end) of each token

    def shortened(self, limit: int) -> "Encoded":
        """At most `limit` tokens: the last ones before the closing special tokens are cut."""
        if len(self.ids) <= limit:
            return self
        _, closing = self.num_specials
        closing = min(closing, limit)
        return self._of([*range(limit - closing), *range(len(self.ids) - closing, len(self.ids))])

    @property
    def num_specials(self) -> tuple[int, int]:
        """Special tokens before the first other token and after the last one."""
        places = [place for place, word in enumerate(self.words) if word is not None]
        return (places[0], len(self.words) - 1 - places[-1]) if places else (0, len(self.words))

    def around(self, first: int, last: int, num_context: int) -> tuple["Encoded", int]:
        """Tokens [first, last), `num_context` more from both sides of them, and the special tokens at both ends.

        Also returns how many tokens were cut in front. The sides get equally many; what one lacks, the other gets.
        """
        opening, closing = self.num_specials
        before, after = first - opening, len(self.ids) - closing - last
        left = min(before, max(num_context // 2, num_context - after))
        right = min(after, num_context - left)
        inner = range(first - left, last + right)
        kept = [*range(opening), *inner, *range(len(self.ids) - closing, len(self.ids))]
        return self._of(kept), before - left

    def _of(self, kept: Sequence[int]) -> "Encoded":
        return Encoded(
            tuple(self.ids[i] for i in kept), tuple(self.words[i] for i in kept), tuple(self.offsets[i] for i in kept)
        )


def encode(tokenizer: Any, sentences: Sequence[str]) -> list[Encoded]:
    """Encode with a stock tokenizer, or with anything whose `backend` is a tokenizers.Tokenizer."""
    backend = getattr(tokenizer, "backend", None)
    if backend is not None and hasattr(backend, "encode_batch"):
        return [_of_backend(item) for item in backend.encode_batch(list(sentences))]
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json, which knows words and offsets. Save the "
            "model's folder with a fast one: AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)."
        )
    batch = tokenizer(list(sentences), add_special_tokens=True, return_attention_mask=False, verbose=False)
    return [_of_backend(item) for item in batch.encodings]


def _of_backend(encoding: Any) -> Encoded:
    words = (None if special else word for word, special in zip(
        encoding.word_ids, encoding.special_tokens_mask, strict=True))  # fmt: skip
    return Encoded(tuple(encoding.ids), tuple(words), tuple(encoding.offsets))


def mask_id_of(tokenizer: Any) -> int:
    """The id of the mask token of a stock tokenizer or of ours."""
    found = getattr(tokenizer, "mask_token_id", getattr(tokenizer, "mask_id", None))
    if found is None:
        raise UserError("the tokenizer has no mask token, which scoring with a masked language model needs.")
    return int(found)


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
    """Some of the inputs, padded, and the entries that belong to them, on the model's device."""

    ids: Tensor  # [B, S]
    mask: Tensor  # [B, S] bool, true on real tokens
    rows: Tensor  # [e] which row of the batch an entry is in
    positions: Tensor  # [e]
    targets: Tensor  # [e]


def make_batch(queries: Queries, chosen: Array, entries: Array, pad_id: int, device: torch.device) -> Batch:
    """`chosen`: numbers of inputs; `entries`: numbers of all entries of these inputs."""
    inputs = [queries.inputs[number] for number in chosen]
    lengths = np.array([len(ids) for ids in inputs])
    real = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = np.concatenate([np.asarray(item) for item in inputs])
    row_of = {int(number): row for row, number in enumerate(chosen)}
    rows = np.array([row_of[number] for number in queries.input_of[entries].tolist()])
    arrays = (ids, real, rows, queries.positions[entries], queries.targets[entries])
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True)
class Team:
    """Processes that share the forward passes of one model: each batch is computed by one, all get the results.

    `all_ranks_gather` returns the values of all of them, in order. `before_round` is called before each round of
    batches, at the same time on all of them; it may raise to give up.
    """

    rank: int = 0
    size: int = 1
    all_ranks_gather: Callable[[Any], list[Any]] = lambda value: [value]
    before_round: Callable[[], None] = lambda: None

    def all_ranks_map(self, work: Callable[[B], R], batches: Sequence[B]) -> list[R]:
        """`work` of every batch. The batches do not depend on `size`, so neither do the results.

        Every process computes equally many, because partitioned weights are gathered from all of them.
        """
        own = []
        for first in range(0, len(batches), self.size):
            self.before_round()
            own.append(work(batches[min(first + self.rank, len(batches) - 1)]))
        parts = self.all_ranks_gather(own)
        return [parts[number % self.size][number // self.size] for number in range(len(batches))]


ALONE = Team()


@contextmanager
def evaluating(model: torch.nn.Module) -> Generator[None]:
    """Switch the model to evaluation, without dropout, and back at the end."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Scorer(ABC):
    """A masked language model that fills in masks. A team shares the batches."""

    def __init__(self, model: Any, pad_id: int, team: Team = ALONE) -> None:
        self.model, self.pad_id, self.team = model, pad_id, team

    @abstractmethod
    def make_batches(self, lengths: Sequence[int]) -> list[Array]:
        """Numbers of the inputs of each batch."""

    @abstractmethod
    def compute_scores(self, batch: Batch) -> Iterator[Tensor]:
        """fp32 scores [e, tokens] of the batch's entries in order, in one or several parts."""

    # Not inference_mode: weights that a training engine gathers in it could not be trained further.
    @torch.no_grad()
    def answer(self, queries: Queries, with_ranks: bool = False) -> Answers:
        if not queries.inputs:
            return Answers(np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64))
        device = next(self.model.parameters()).device
        order = np.argsort(queries.input_of, kind="stable")
        starts = np.searchsorted(queries.input_of[order], np.arange(len(queries.inputs) + 1))

        def work(chosen: Array) -> tuple[Array, list[Answers]]:
            entries = np.concatenate([order[starts[number] : starts[number + 1]] for number in chosen])
            batch = make_batch(queries, chosen, entries, self.pad_id, device)
            answers, first = [], 0
            for scores in self.compute_scores(batch):
                answers.append(_read_scores(scores, batch.targets[first : first + len(scores)], with_ranks))
                first += len(scores)
            return entries, answers

        with evaluating(self.model):
            answered = self.team.all_ranks_map(work, self.make_batches([len(ids) for ids in queries.inputs]))
        places = np.argsort(np.concatenate([entries for entries, _ in answered]))
        parts = [part for _, answers in answered for part in answers]
        ranks = np.concatenate([part.ranks for part in parts])[places] if with_ranks else None
        return Answers(np.concatenate([part.log_probs for part in parts])[places], ranks)


def _read_scores(scores: Tensor, targets: Tensor, with_ranks: bool) -> Answers:
    """Log-probabilities (and ranks) of `targets` [e] under fp32 `scores` [e, tokens]."""
    at_target = scores.gather(1, targets[:, None]).squeeze(1)
    log_probs = (at_target - scores.logsumexp(1)).cpu().numpy()
    return Answers(log_probs, (1 + (scores > at_target[:, None]).sum(1)).cpu().numpy() if with_ranks else None)


class StockScorer(Scorer):
    """Any AutoModelForMaskedLM: padded batches, scores of every token at every position."""

    def __init__(self, model: Any, pad_id: int, batch_size: int = 64) -> None:
        super().__init__(model, pad_id)
        self.batch_size = batch_size

    def make_batches(self, lengths: Sequence[int]) -> list[Array]:
        return np.split(np.arange(len(lengths)), range(self.batch_size, len(lengths), self.batch_size))

    def compute_scores(self, batch: Batch) -> Iterator[Tensor]:
        logits = self.model(input_ids=batch.ids, attention_mask=batch.mask.long()).logits
        yield logits[batch.rows, batch.positions].float()


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

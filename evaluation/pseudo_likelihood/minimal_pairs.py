"""Minimal pairs and cloze, zero-shot: does the model prefer what people accept?"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from evaluation.pseudo_likelihood.likelihood import (
    Encoded,
    Masking,
    Scorer,
    encode,
    make_queries,
    mask_id_of,
    score_sentences,
)

GAP = re.compile(r"\[MASK\]|<mask>|_{3,}")
SENTENCES_AT_ONCE = 2000  # between two reports of progress


@dataclass(frozen=True)
class PairScores:
    """Scores of P pairs: 1 where the good sentence is more probable, 0 where the bad one is, ½ for a tie."""

    by_sum: np.ndarray  # [P]
    by_mean: np.ndarray  # [P] by the mean per token
    good: np.ndarray  # [P] summed log-probabilities
    bad: np.ndarray  # [P]
    num_shortened: int  # sentences that were longer than the model's positions

    @property
    def accuracy(self) -> float:
        return float(self.by_sum.mean())


def score_pairs(
    scorer: Scorer,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    masking: Masking = "token",
    max_positions: int = 512,
    progress: Callable[[int], None] = lambda _: None,
) -> PairScores:
    """Score (good, bad) sentences. `progress` is called with numbers of finished pairs."""
    parts, num_shortened = [], 0
    step = SENTENCES_AT_ONCE // 2
    for first in range(0, len(pairs), step):
        chosen = pairs[first : first + step]
        encoded = encode(tokenizer, [sentence for pair in chosen for sentence in pair])
        short = [sentence.shortened(max_positions) for sentence in encoded]
        num_shortened += sum(len(item.ids) > max_positions for item in encoded)
        scores = score_sentences(scorer, short, mask_id_of(tokenizer), masking)
        parts.append((scores.sums.reshape(-1, 2), scores.means.reshape(-1, 2)))
        progress(len(chosen))
    sums, means = (np.concatenate(part) for part in zip(*parts, strict=True))
    return PairScores(preferred(sums), preferred(means), sums[:, 0], sums[:, 1], num_shortened)


def preferred(scores: np.ndarray) -> np.ndarray:
    """[P, 2] scores of good and bad sentences → [P]: 1, 0, or ½ for a tie."""
    return (np.sign(scores[:, 0] - scores[:, 1]) + 1) / 2


@dataclass(frozen=True)
class ClozeScores:
    correct: np.ndarray  # [N] 1, 0, or a share where choices tie
    reciprocal_ranks: np.ndarray  # [N]
    num_shortened: int  # texts that were longer than the model's positions


def score_cloze(
    scorer: Scorer, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_positions: int = 512
) -> ClozeScores:
    """Rows with `text` (one gap: [MASK] or ___), `answer` and perhaps `choices`.

    With choices, all tokens of a choice are masked together, and the choice with the highest mean log-probability is
    taken, so that long ones are not at a disadvantage. Without, the answer's tokens compete with the whole vocabulary.
    """
    filled = [fill_gap(tokenizer, row, max_positions) for row in rows]
    wanted = [(sentence, [(hidden, hidden)]) for row in filled for sentence, hidden in row.copies]
    queries = make_queries(wanted, mask_id_of(tokenizer))
    answers = scorer.answer(queries, with_ranks=True)
    assert answers.ranks is not None
    ends = np.cumsum(np.bincount(queries.owners, minlength=len(wanted)))[:-1]
    log_probs, ranks = np.split(answers.log_probs.astype(np.float64), ends), np.split(answers.ranks, ends)  # of copies
    correct, reciprocal, place = [], [], 0
    for row, gap in zip(rows, filled, strict=True):
        if choices := row.get("choices"):
            scores = np.array([part.mean() for part in log_probs[place : place + len(choices)]])
            own, best = scores[choices.index(row["answer"])], scores.max()
            correct.append(float(own == best) / int((scores == best).sum()))
            reciprocal.append(1.0 / (1 + int((scores > own).sum())))
        else:
            correct.append(float(ranks[place].max() == 1))
            reciprocal.append(float((1.0 / ranks[place]).mean()))
        place += len(gap.copies)
    return ClozeScores(np.array(correct), np.array(reciprocal), sum(row.was_cut for row in filled))


class FilledGap(NamedTuple):
    """A text with each choice (or the answer) in its gap, and the positions of the tokens that come from it."""

    copies: list[tuple[Encoded, tuple[int, ...]]]
    was_cut: bool  # to the model's positions: the gap and what is nearest to it were kept


def fill_gap(tokenizer: Any, row: dict[str, Any], max_positions: int) -> FilledGap:
    line, text, choices = row.get("line", "?"), row["text"], row.get("choices") or [row["answer"]]
    gaps = list(GAP.finditer(text))
    if len(gaps) != 1:
        raise UserError(f"line {line}: has {len(gaps)} gaps, expected one [MASK] or ___ in {text!r}.")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise UserError(f"line {line}: choices are {choices!r}, expected a list of texts. Use format jsonl.")
    if row["answer"] not in choices:
        raise UserError(f"line {line}: the answer {row['answer']!r} is not among {choices!r}.")
    start, end = gaps[0].span()
    sentences = encode(tokenizer, [text[:start] + choice + text[end:] for choice in choices])
    filled = []
    for choice, sentence in zip(choices, sentences, strict=True):
        last = start + len(choice)
        hidden = tuple(
            position
            for position, ((first, stop), word) in enumerate(zip(sentence.offsets, sentence.words, strict=True))
            if word is not None and first < last and stop > start
        )
        if not hidden:
            raise UserError(f"line {line}: {choice!r} has no tokens in this vocabulary.")
        filled.append((sentence, hidden))
    if all(len(sentence.ids) <= max_positions for sentence in sentences):
        return FilledGap(filled, was_cut=False)
    return FilledGap(_cut_around_gap(filled, max_positions, f"line {line}"), was_cut=True)


def _cut_around_gap(
    filled: list[tuple[Encoded, tuple[int, ...]]], max_positions: int, where: str
) -> list[tuple[Encoded, tuple[int, ...]]]:
    """All copies with the same number of tokens around the gap, so that choices are compared in the same context."""
    longest = max(hidden[-1] + 1 - hidden[0] for _, hidden in filled)
    num_context = max_positions - sum(filled[0][0].num_specials) - longest
    if num_context < 0:
        raise UserError(
            f"{where}: a choice has {longest} tokens, but the model has {max_positions} positions. Shorten the choice."
        )
    cut = []
    for sentence, hidden in filled:
        part, num_cut = sentence.around(hidden[0], hidden[-1] + 1, num_context)
        cut.append((part, tuple(position - num_cut for position in hidden)))
    return cut

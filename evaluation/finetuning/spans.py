"""Extractive answers: long texts in overlapping windows, and the best span of all windows of a question."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_QUESTION_TOKENS = 64
MAX_ANSWER_TOKENS = 30
NUM_BEST = 20  # starts and ends that are combined


class Window(NamedTuple):
    row: int
    offsets: list[tuple[int, int] | None]  # characters of the text that a token covers; None outside the text


def make_windows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], limit: int, stride: int, with_labels: bool
) -> tuple[list[dict[str, Any]], list[Window]]:
    """Inputs of at most `limit` tokens: question and a window of the text; neighbours share `stride` tokens.

    With labels, each has the positions of the first answer's first and last token, or twice that of the first token
    ([CLS]) where the window does not contain the whole answer.
    """
    max_question = min(MAX_QUESTION_TOKENS, limit // 3)
    questions = [_shortened(tokenizer, row["question"], max_question) for row in rows]
    room = limit - max_question - tokenizer.num_special_tokens_to_add(pair=True)
    batch = tokenizer(
        questions,
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=limit,
        stride=max(0, min(stride, room // 2)),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    keys = [key for key in batch if key in ("input_ids", "attention_mask", "token_type_ids")]
    inputs, windows = [], []
    for number, row in enumerate(batch["overflow_to_sample_mapping"]):
        of_text = [part == 1 for part in batch.sequence_ids(number)]
        offsets = [tuple(pair) if inside else None for pair, inside in zip(
            batch["offset_mapping"][number], of_text, strict=True)]  # fmt: skip
        item = {key: batch[key][number] for key in keys}
        if with_labels:
            item["labels"] = _positions(rows[row]["answers"], offsets)
        inputs.append(item)
        windows.append(Window(row, offsets))
    return inputs, windows


def _shortened(tokenizer: Any, question: str, limit: int) -> str:
    offsets = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return question if len(offsets) <= limit else question[: offsets[limit - 1][1]]


def _positions(answers: Sequence[tuple[str, int]], offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    if not answers:
        return 0, 0
    text, first = answers[0]
    last = first + len(text)
    covered = [
        (place, span) for place, span in enumerate(offsets) if span is not None and span[0] < last and span[1] > first
    ]
    if not covered or covered[0][1][0] > first or covered[-1][1][1] < last:
        return 0, 0
    return covered[0][0], covered[-1][0]


def best_texts(
    rows: Sequence[dict[str, Any]], windows: Sequence[Window], starts: np.ndarray, ends: np.ndarray, has_no_answer: bool
) -> list[str]:
    """The most probable span of each question; "" where no answer is possible and scores higher."""
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(rows)
    null = np.full(len(rows), np.inf)
    for number, window in enumerate(windows):
        size = len(window.offsets)
        start, end = starts[number, :size], ends[number, :size]
        # The window with the lowest score for "no answer" decides whether there is none.
        null[window.row] = min(null[window.row], float(start[0] + end[0]))
        found = _best_span(window.offsets, start, end)
        if found is not None and found[0] > best[window.row][0]:
            first, last = found[1]
            best[window.row] = (found[0], rows[window.row]["context"][first:last])
    return ["" if has_no_answer and null[row] > score else text for row, (score, text) in enumerate(best)]


def _best_span(
    offsets: Sequence[tuple[int, int] | None], start: np.ndarray, end: np.ndarray
) -> tuple[float, tuple[int, int]] | None:
    inside = np.array([place for place, span in enumerate(offsets) if span is not None])
    if not len(inside):
        return None
    firsts = inside[np.argsort(-start[inside], kind="stable")[:NUM_BEST]]
    lasts = inside[np.argsort(-end[inside], kind="stable")[:NUM_BEST]]
    scores = start[firsts][:, None] + end[lasts][None, :]
    length = lasts[None, :] - firsts[:, None]
    scores = np.where((length >= 0) & (length < MAX_ANSWER_TOKENS), scores, -np.inf)
    row, column = divmod(int(scores.argmax()), scores.shape[1])
    first, last = offsets[int(firsts[row])], offsets[int(lasts[column])]
    if not np.isfinite(scores[row, column]) or first is None or last is None:
        return None
    return float(scores[row, column]), (first[0], last[1])

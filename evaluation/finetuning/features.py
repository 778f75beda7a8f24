"""Rows → inputs of a stock model, and its outputs → predictions.

Long texts of extractive answers are cut into overlapping windows, and the best span of all windows is the answer.

N rows, S tokens of the longest row, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evaluation.finetuning.models import ModelFolder
from evaluation.tasks.readers import Row
from evaluation.tasks.task import Task

IGNORED = -100  # label of tokens that are not scored
MAX_QUESTION_TOKENS = 64
MAX_ANSWER_TOKENS = 30
NUM_BEST = 20  # starts and ends that are combined


class Window(NamedTuple):
    row: int
    offsets: list[tuple[int, int] | None]  # characters of the text that a token covers; None outside the text


@dataclass(frozen=True)
class Features:
    """Inputs for the model, one or more per row, and what is needed to read its outputs."""

    inputs: list[dict[str, Any]]  # each with input_ids, attention_mask and perhaps token_type_ids and labels
    num_shortened: int  # rows that were longer than the limit
    windows: list[Window] | None = None  # of kind "span"


def make_features(
    task: Task, model: ModelFolder, rows: Sequence[Row], labels: Sequence[str], *, with_labels: bool
) -> Features:
    limit = min(task.max_length, model.max_positions)
    if task.kind == "span":
        inputs, windows = make_windows(model, rows, limit, task.doc_stride, with_labels)
        return Features(inputs, 0, windows)
    texts = [list(row["tokens"]) if task.kind == "tokens" else row["text"] for row in rows]
    second = [row["text_pair"] for row in rows] if "text_pair" in task.columns else None
    inputs, num_shortened = _tokenize(model, texts, second, limit, split=task.kind == "tokens")
    numbers = {label: number for number, label in enumerate(labels)}
    for item, row in zip(inputs, rows, strict=True) if with_labels else ():
        item["labels"] = row["label"]
        if task.kind == "tokens":
            item["labels"] = [IGNORED if word is None else numbers[row["label"][word]] for word in item["first_of"]]
    return Features(inputs, num_shortened)


def _tokenize(
    model: ModelFolder, texts: Sequence[Any], second: Sequence[str] | None, limit: int, split: bool
) -> tuple[list[dict[str, Any]], int]:
    """Inputs; rows beyond `limit` tokens are cut and counted. Of `split` texts also the words that tokens begin."""

    def run(chosen: Sequence[int], **more: Any) -> list[dict[str, Any]]:
        pair = None if second is None else [second[i] for i in chosen]
        batch = model.tokenize([texts[i] for i in chosen], pair, is_split_into_words=split, **more)
        return [
            {key: batch[key][i] for key in batch} | ({"first_of": _first_tokens(batch.word_ids(i))} if split else {})
            for i in range(len(chosen))
        ]

    encoded = run(range(len(texts)))
    long = [i for i, item in enumerate(encoded) if len(item["input_ids"]) > limit]
    if long:
        for i, item in zip(long, run(long, truncation=True, max_length=limit), strict=True):
            encoded[i] = item
    return encoded, len(long)


def _first_tokens(word_ids: Sequence[int | None]) -> list[int | None]:
    """The word number at the first token of each word, None elsewhere."""
    return [None if word == before else word for before, word in pairwise([None, *word_ids])]


def collate(pad_id: int, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of inputs, padded to its longest row."""
    length = max(len(item["input_ids"]) for item in items)
    batch = {}
    for key, pad in {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}.items():
        if key in items[0]:
            values = [item[key] for item in items]
            if isinstance(values[0], list):  # one value per token; a span's two positions are a tuple
                values = [value + [pad] * (length - len(value)) for value in values]
            batch[key] = torch.tensor(values)
    return batch


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Loss summed over this batch's items and divided by the number in the whole batch, over all ranks and micro-steps.

    The stock heads return means per micro-batch instead, which weights the items of a short last one more.
    """
    count = num_items_in_batch if num_items_in_batch is not None else (labels != IGNORED).sum()
    if "start_logits" in outputs:
        scores = torch.stack([outputs["start_logits"], outputs["end_logits"]], 1).float()  # [B, 2, S]
    else:
        scores = outputs["logits"].float()
    if scores.shape[-1] == 1:
        return functional.mse_loss(scores.squeeze(-1), labels.float(), reduction="sum") / count
    scores, labels = scores.flatten(0, -2), labels.flatten()
    return functional.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED) / count


def read_outputs(
    task: Task, rows: Sequence[Row], features: Features, outputs: Any, labels: Sequence[str], has_no_answer: bool
) -> list[Any]:
    """Predictions, one per row: class number, number, list of tags, or text."""
    if task.kind == "span":
        assert features.windows is not None
        starts, ends = (np.nan_to_num(np.asarray(part, np.float32)) for part in outputs)
        return best_texts(rows, features.windows, starts, ends, has_no_answer)
    values = np.nan_to_num(np.asarray(outputs, np.float32))
    if task.kind == "regress":
        return [float(value) for value in values.reshape(len(rows))]
    if task.kind != "tokens":
        return [int(number) for number in values.argmax(-1)]
    tags = []
    for row, item, scores in zip(rows, features.inputs, values, strict=True):
        found = ["O"] * len(row["tokens"])  # words that were cut off have no entity
        for place, word in enumerate(item["first_of"]):
            if word is not None:
                found[word] = labels[int(scores[place].argmax())]
        tags.append(found)
    return tags


def make_windows(
    model: ModelFolder, rows: Sequence[dict[str, Any]], limit: int, stride: int, with_labels: bool
) -> tuple[list[dict[str, Any]], list[Window]]:
    """Inputs of at most `limit` tokens: question and a window of the text; neighbours share `stride` tokens.

    With labels, each has the positions of the first answer's first and last token, or twice that of the first token
    ([CLS]) where the window does not contain the whole answer.
    """
    max_question = min(MAX_QUESTION_TOKENS, limit // 3)
    questions = [_shortened(model.tokenizer, row["question"], max_question) for row in rows]
    room = limit - max_question - model.tokenizer.num_special_tokens_to_add(pair=True)
    batch = model.tokenize(
        questions,
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=limit,
        stride=max(0, min(stride, room // 2)),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
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

"""Rows → inputs of a stock model, and its outputs → predictions, for tasks whose texts fit one window.

N rows, S tokens of the longest row, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evaluation.finetuning import spans
from evaluation.finetuning.models import ModelFolder
from evaluation.tasks.readers import Row
from evaluation.tasks.task import Task

IGNORED = -100  # label of tokens that are not scored


@dataclass(frozen=True)
class Features:
    """Inputs for the model, one or more per row, and what is needed to read its outputs."""

    inputs: list[dict[str, Any]]  # each with input_ids, attention_mask and perhaps token_type_ids and labels
    num_shortened: int  # rows that were longer than the limit
    windows: list[spans.Window] | None = None  # of kind "span"


def make_features(
    task: Task, model: ModelFolder, rows: Sequence[Row], labels: Sequence[str], *, with_labels: bool
) -> Features:
    limit = min(task.max_length, model.max_positions)
    if task.kind == "span":
        inputs, windows = spans.make_windows(model.tokenizer, rows, limit, task.doc_stride, with_labels)
        return Features([_usable(item, model) for item in inputs], 0, windows)
    if task.kind == "tokens":
        words = [list(row["tokens"]) for row in rows]
        encoded, num_shortened = _tokenize(model.tokenizer, words, None, limit, split=True)
    else:
        texts = [row["text"] for row in rows]
        second = [row["text_pair"] for row in rows] if "text_pair" in task.columns else None
        encoded, num_shortened = _tokenize(model.tokenizer, texts, second, limit, split=False)
    inputs = []
    numbers = {label: number for number, label in enumerate(labels)}
    for item, row in zip(encoded, rows, strict=True):
        features = _usable(item, model)
        if task.kind == "tokens":
            firsts = _first_tokens(item["word_ids"])
            if with_labels:
                features["labels"] = [IGNORED if word is None else numbers[row["label"][word]] for word in firsts]
            features["first_of"] = firsts
        elif with_labels:
            features["labels"] = row["label"]
        inputs.append(features)
    return Features(inputs, num_shortened)


def _tokenize(
    tokenizer: Any, texts: Sequence[Any], second: Sequence[str] | None, limit: int, split: bool
) -> tuple[list[dict[str, Any]], int]:
    """Encodings with their word numbers; rows beyond `limit` tokens are cut and counted."""
    options = {"is_split_into_words": split, "verbose": False}

    def run(chosen: Sequence[int], **more: Any) -> list[dict[str, Any]]:
        pair = None if second is None else [second[i] for i in chosen]
        batch = tokenizer([texts[i] for i in chosen], pair, **options, **more)
        keys = [key for key in batch if key in ("input_ids", "attention_mask", "token_type_ids")]
        return [
            {key: batch[key][i] for key in keys} | ({"word_ids": batch.word_ids(i)} if split else {})
            for i in range(len(chosen))
        ]

    encoded = run(range(len(texts)))
    long = [i for i, item in enumerate(encoded) if len(item["input_ids"]) > limit]
    if long:
        for i, item in zip(long, run(long, truncation=True, max_length=limit), strict=True):
            encoded[i] = item
    return encoded, len(long)


def _usable(item: dict[str, Any], model: ModelFolder) -> dict[str, Any]:
    """The inputs that the model takes: no word numbers, and no token types if it has only one."""
    keys = ["input_ids", "attention_mask", "labels"]
    if getattr(model.config, "type_vocab_size", 0) > 1:
        keys.append("token_type_ids")
    return {key: item[key] for key in keys if key in item}


def _first_tokens(word_ids: Sequence[int | None]) -> list[int | None]:
    """The word number at the first token of each word, None elsewhere."""
    return [
        word if word is not None and (i == 0 or word_ids[i - 1] != word) else None for i, word in enumerate(word_ids)
    ]


class Collator:
    """Pads a batch to its longest row."""

    def __init__(self, pad_id: int) -> None:
        self.pads = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(len(item["input_ids"]) for item in items)
        batch = {}
        for key, pad in self.pads.items():
            if key not in items[0]:
                continue
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
        scores = torch.stack([outputs["start_logits"], outputs["end_logits"]], 1)  # [B, 2, S]
        return functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
    scores = outputs["logits"].float()
    if scores.shape[-1] == 1:
        return functional.mse_loss(scores.squeeze(-1), labels.float(), reduction="sum") / count
    return (
        functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED) / count
    )


def read_outputs(
    task: Task, rows: Sequence[Row], features: Features, outputs: Any, labels: Sequence[str], has_no_answer: bool
) -> list[Any]:
    """Predictions, one per row: class number, number, list of tags, or text."""
    if task.kind == "span":
        assert features.windows is not None
        starts, ends = (np.nan_to_num(np.asarray(part, np.float32)) for part in outputs)
        return spans.best_texts(rows, features.windows, starts, ends, has_no_answer)
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

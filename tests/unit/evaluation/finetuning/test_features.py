"""Inputs for stock models: labels on first pieces, cut rows, windows of long texts, and the loss."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification

from evaluation.finetuning.features import (
    IGNORED,
    Window,
    best_texts,
    collate,
    make_features,
    make_windows,
    mean_loss,
    read_outputs,
)
from evaluation.finetuning.models import ModelFolder
from evaluation.tasks.task import make_task
from tests.unit.evaluation.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


@dataclass(frozen=True)
class FakeModel:
    """What features ask of a model."""

    tokenizer: Any
    max_positions: int
    config: Any
    tokenize = ModelFolder.tokenize


MODEL: Any = FakeModel(TOKENIZER, 40, BertConfig(type_vocab_size=2))
TAGGING = make_task(
    {"name": "t", "kind": "tokens", "format": "conll", "metrics": ["entity_f1"], "train": "a", "dev": "b",
     "columns": {"tokens": 0, "label": 1}, "max_length": 12}, "t",
)  # fmt: skip
CLASSIFY = make_task(
    {"name": "c", "kind": "classify", "format": "csv", "metrics": ["accuracy"], "train": "a", "dev": "b",
     "columns": {"text": "t", "label": "l"}, "max_length": 12}, "c",
)  # fmt: skip
LABELS = ("O", "B-X", "I-X")


def test_tags_stand_on_the_first_piece_of_each_word() -> None:
    row = {"tokens": ["teacher", "sees", "."], "label": ["B-X", "O", "O"]}
    features = make_features(TAGGING, MODEL, [row], LABELS, with_labels=True)
    item = features.inputs[0]
    pieces = len(TOKENIZER.tokenize("teacher"))
    assert pieces > 1
    assert item["labels"][: pieces + 2] == [IGNORED, 1, *[IGNORED] * (pieces - 1), 0]
    scores = np.zeros((1, len(item["input_ids"]), 3), np.float32)
    scores[0, 1, 1] = 5  # "B-X" at the first piece of the first word
    scores[0, 2, 2] = 9  # later pieces are not asked
    assert read_outputs(TAGGING, [row], features, scores, LABELS, False) == [["B-X", "O", "O"]]


def test_words_that_were_cut_off_have_no_entity() -> None:
    row = {"tokens": ["teacher"] * 9, "label": ["B-X"] * 9}
    features = make_features(TAGGING, MODEL, [row], LABELS, with_labels=True)
    assert features.num_shortened == 1
    assert len(features.inputs[0]["input_ids"]) == 12
    scores = np.zeros((1, 12, 3), np.float32)
    scores[..., 1] = 1
    (tags,) = read_outputs(TAGGING, [row], features, scores, LABELS, False)
    assert len(tags) == 9
    assert tags[0] == "B-X"
    assert tags[-1] == "O"


def test_long_rows_are_cut_and_counted_and_token_types_follow_the_model() -> None:
    rows = [{"text": "the cat ." * 20, "label": 1}, {"text": "the dog", "label": 0}]
    features = make_features(CLASSIFY, MODEL, rows, ("a", "b"), with_labels=True)
    assert features.num_shortened == 1
    assert [len(item["input_ids"]) <= 12 for item in features.inputs] == [True, True]
    assert "token_type_ids" in features.inputs[0]
    one_type: Any = FakeModel(TOKENIZER, 40, BertConfig(type_vocab_size=1))
    assert "token_type_ids" not in make_features(CLASSIFY, one_type, rows, ("a", "b"), with_labels=True).inputs[0]


def tiny_config(**options: Any) -> BertConfig:
    sizes = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(**sizes, intermediate_size=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **options)


def test_the_loss_is_the_stock_mean_and_adds_up_over_micro_batches() -> None:
    torch.manual_seed(0)
    rows = [{"text": "the cat " * (i + 1), "label": i % 2} for i in range(5)]
    inputs = make_features(CLASSIFY, MODEL, rows, ("a", "b"), with_labels=True).inputs
    model = BertForSequenceClassification(tiny_config(num_labels=2)).eval()
    batch = collate(0, inputs)
    stock = model(**batch).loss
    labels = batch.pop("labels")
    assert torch.allclose(mean_loss(model(**batch), labels, torch.tensor(5)), stock, atol=1e-6)
    parts = []
    for part in (inputs[:3], inputs[3:]):
        small = collate(0, part)
        labels = small.pop("labels")
        parts.append(mean_loss(model(**small), labels, torch.tensor(5)))
    assert torch.allclose(sum(parts), stock, atol=1e-6)  # type: ignore[arg-type]


def test_the_loss_of_spans_is_the_stock_one() -> None:
    torch.manual_seed(0)
    rows = [{"question": "the cat", "context": "the dog sees the bird .", "answers": [("dog", 4)]}] * 2
    inputs, _ = make_windows(MODEL, rows, 90, 8, with_labels=True)
    model = BertForQuestionAnswering(tiny_config()).eval()
    batch = collate(0, inputs)
    labels = batch.pop("labels")
    outputs = model(**batch, start_positions=labels[:, 0], end_positions=labels[:, 1])
    assert torch.allclose(mean_loss(outputs, labels, torch.tensor(labels.numel())), outputs.loss, atol=1e-6)


def test_windows_cover_a_long_text_and_mark_the_answer_where_it_is_whole() -> None:
    context = "the cat sees the dog . " * 40 + "the teacher paints a bird ."
    start = context.index("teacher")
    rows = [{"question": "the bird", "context": context, "answers": [("teacher", start)]}]
    inputs, windows = make_windows(MODEL, rows, 90, 20, with_labels=True)
    assert len(windows) > 1
    covered = {place for window in windows for span in window.offsets if span for place in range(*span)}
    assert covered >= {place for place, character in enumerate(context) if not character.isspace()}
    marked = [
        (item["labels"], window) for item, window in zip(inputs, windows, strict=True) if item["labels"] != (0, 0)
    ]
    assert marked
    for (first, last), window in marked:
        first_span, last_span = window.offsets[first], window.offsets[last]
        assert first_span is not None
        assert last_span is not None
        assert context[first_span[0] : last_span[1]] == "teacher"


def test_the_best_span_of_all_windows_and_no_answer() -> None:
    rows = [{"context": "one two three four"}]
    windows = [Window(0, [None, (0, 3), (4, 7)]), Window(0, [None, (8, 13), (14, 18)])]
    starts = np.array([[0, 1, 0], [0, 2, 9]], np.float32)
    ends = np.array([[0, 1, 0], [0, 4, 0]], np.float32)
    # The end at "three" and the start at "four" score most, but an answer cannot end before it starts.
    assert best_texts(rows, windows, starts, ends, has_no_answer=False) == ["four"]
    starts[:, 0], ends[:, 0] = 6, 6
    assert best_texts(rows, windows, starts, ends, has_no_answer=True) == [""]
    assert best_texts(rows, windows, starts, ends, has_no_answer=False) == ["four"]
    starts[1, 0] = -6  # one window holds an answer
    assert best_texts(rows, windows, starts, ends, has_no_answer=True) == ["four"]


@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_outputs_that_are_not_finite_become_predictions(kind: str) -> None:
    content = CLASSIFY.model_dump() | {"kind": kind, "metrics": ["accuracy" if kind == "classify" else "pearson"]}
    task = make_task(content, "c")
    features = make_features(CLASSIFY, MODEL, [{"text": "a", "label": 0}], ("a", "b"), with_labels=False)
    outputs = np.full((1, 2 if kind == "classify" else 1), np.nan, np.float32)
    assert read_outputs(task, [{}], features, outputs, ("a", "b"), False) == [0]

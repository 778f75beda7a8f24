"""Notes at the start of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvidia.attention.sparsity import SparseAttention
from nvidia.config import BertConfig
from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.banner import find_attention_notes, find_model_notes, find_notes, find_warnings
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.plan.step_plan import Phase, plan_steps


def horizon(**changes: int) -> Horizon:
    plan = plan_steps([(0, Phase(0, 24, 4, 30, 18.5))], None, accumulation=1, world_size=1)
    values = {"num_epochs": 2, "total_steps": 15, "schedule_origin": 0}
    return Horizon(plan=plan, start_step=0, **{**values, **changes})


def notes(plan: Horizon, total: int, warmup: float = 0.1, **changes: object) -> list[str]:
    schedule = Schedule("linear", peak=1.0, total_steps=total, warmup_proportion=warmup)
    options = {"num_parameters": 1000, "output_dir": Path("/"), "has_validation": True, **changes}
    return find_notes(plan, schedule, **options)  # type: ignore[arg-type]


def test_a_consistent_plan_gets_no_note() -> None:
    assert notes(horizon(), total=15) == []


def test_what_the_user_may_not_expect() -> None:
    (cut,) = notes(horizon(total_steps=150), total=150)
    assert "ends at step 15, before the end of the schedule at 150" in cut
    assert any("no validation data" in note for note in notes(horizon(), total=15, has_validation=False))
    assert any("GiB free" in note for note in notes(horizon(), total=15, num_parameters=10**18))


BASE = BertConfig(vocab_size=64, hidden_size=128, num_attention_heads=2)
BIGBIRD = replace(BASE, sparse_attention=SparseAttention.from_dict({"mode": "bigbird"}))


@pytest.mark.parametrize(
    ("config", "precision", "device", "capability", "words"),
    [
        (BASE, "fp16", "cuda", (8, 0), "by 'sdpa', including padding, because the faster 'varlen' has no dropout"),
        (BIGBIRD, "fp32", "cuda", (8, 0), "by 'plain', including padding, because the faster 'flex' has no dropout"),
        (replace(BASE, attention_probs_dropout_prob=0.0), "fp16", "cuda", (8, 0), None),
        (replace(BASE, attention_backend="sdpa"), "fp16", "cuda", (8, 0), None),  # the user's own choice
        (BASE, "fp32", "cuda", (8, 0), None),  # varlen would not run anyway
        (BASE, "fp16", "cuda", (7, 5), None),
        (replace(BIGBIRD, position_embedding_type="relative_key"), "fp16", "cuda", (8, 0), None),
        (BASE, "fp32", "cpu", None, None),
    ],
)
def test_dropout_that_prevents_a_faster_backend(
    config: BertConfig, precision: str, device: str, capability: tuple[int, int] | None, words: str | None
) -> None:
    found = find_attention_notes(config, precision, device, capability)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
    assert words is None or "attention_probs_dropout_prob is 0.1; set it to 0 in the model JSON" in found[0]
    assert words is None or ("'jagged'" in found[0]) != config.is_sparse


@pytest.mark.parametrize(
    ("changes", "row_length", "words"),
    [
        ({"attention_window": 128, "global_attention_every": 3}, 128, None),
        ({"attention_window": 128, "global_attention_every": 3}, 65, "in rows of 65 tokens every token sees all"),
        ({"type_vocab_size": 0}, 128, "sentence_head 'nsp'"),
        ({"type_vocab_size": 0, "sentence_head": "none"}, 128, None),
    ],
)
def test_parts_of_the_model_without_effect(changes: dict[str, Any], row_length: int, words: str | None) -> None:
    found = find_model_notes(BertConfig(vocab_size=8, **changes), row_length)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def warnings(
    total: int = 15, plan: Horizon | None = None, peak: float = 1e-4, warmup: float = 0.1, **changes: object
) -> list[str]:
    schedule = Schedule("linear", peak=peak, total_steps=total, warmup_proportion=warmup)
    options = {"optimizer": "AdamW", "rows": 8, "weight_decay": 0.01, **changes}
    return find_warnings(plan or horizon(), schedule, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, None),
        ({"peak": 4.0}, "the learning rate of 4 is far above those at which AdamW has trained a BERT"),
        ({"peak": 0.011}, "far above"),
        ({"peak": 0.011, "optimizer": "Lamb"}, None),
        ({"peak": 0.03, "optimizer": "Muon"}, None),
        ({"peak": 4.0, "optimizer": "Lion"}, "Lion"),
        ({"peak": 1e-9}, "will hardly learn"),
        ({"warmup": 0.6}, "the warm-up takes 60% of the schedule"),
        ({"total": 150, "plan": horizon(total_steps=150), "warmup": 0.5}, "the end of its warm-up (75 steps)"),
        ({"total": 150, "plan": horizon(total_steps=2**62), "warmup": 0.5}, None),  # shares of a time budget
        ({"rows": 3}, "a step has only 3 rows"),
        ({"weight_decay": 1.0}, "a weight decay of 1 is far above"),
    ],
)  # fmt: skip
def test_values_far_outside_what_has_worked(given: dict[str, Any], words: str | None) -> None:
    found = warnings(**given)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_with_a_time_budget_there_is_no_note_on_the_schedule() -> None:
    assert notes(horizon(total_steps=2**62), total=150, warmup=0.5) == []


@pytest.mark.parametrize("dry", [True, False])
def test_a_run_and_a_dry_run_warn(dry: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write_project(tmp_path), "--learning_rate", "4.0", "--train_batch_size", "3", "--max_steps", "1"]
    run_here([*words, *(["--dry_run"] if dry else [])])
    said = capsys.readouterr().err
    assert "warning: the learning rate of 4 is far above" in said
    assert "warning: a step has only 3 rows" in said

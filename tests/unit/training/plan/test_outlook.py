"""What is said before a run starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from data.shards.dataset import open_dataset
from nvidia.attention.sparsity import SparseAttention
from nvidia.config import BertConfig
from tests.support import make_rows, write_nvidia_shard
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.plan.outlook import (
    find_attention_notes,
    find_early_end,
    find_notes,
    format_count,
    look_ahead,
    mean_tokens,
)
from training.plan.step_plan import Phase, plan_steps
from training.plan.time_budget import Budget


def horizon(**changes: int) -> Horizon:
    plan = plan_steps([(0, Phase(0, 24, 4, 30, 18.5))], None, accumulation=1, world_size=1)
    values = {"num_epochs": 2, "total_steps": 15, "schedule_origin": 0}
    return Horizon(plan=plan, start_step=0, **{**values, **changes})


def notes(plan: Horizon, total: int, warmup: float = 0.1, **changes: object) -> list[str]:
    schedule = Schedule("linear", peak=1.0, total_steps=total, warmup_proportion=warmup)
    options = {"num_parameters": 1000, "output_dir": Path("/"), "has_validation": True, **changes}
    return find_notes(plan, schedule, **options)  # type: ignore[arg-type]


def test_tokens_of_a_row(tmp_path: Path) -> None:
    rows = make_rows(30, 24, 4, seed=1)
    write_nvidia_shard(tmp_path / "a_training_0.hdf5", rows)
    data = open_dataset([tmp_path], split="training", max_seq_length=24, max_predictions_per_seq=4)
    assert mean_tokens(data) == pytest.approx(rows["input_mask"].sum() / 30)


def test_tokens_and_epochs() -> None:
    outlook = look_ahead(horizon(), step=5, samples=20)
    assert outlook.data_tokens == pytest.approx(30 * 18.5)
    assert outlook.steps_left == 10
    assert outlook.epochs_left == pytest.approx(40 / 30)
    assert outlook.tokens_left == pytest.approx(40 * 18.5)


def test_tokens_and_epochs_across_two_lengths() -> None:
    phases = [(0, Phase(0, 24, 4, 30, 18.0)), (700, Phase(1, 48, 2, 20, 36.0))]
    plan = plan_steps(phases, None, accumulation=1, world_size=1)
    assert plan.phases[1].first_sample == 40  # the first step that begins at 700 tokens or later
    outlook = look_ahead(Horizon(plan, 3, 15, 0, 0), step=5, samples=20)
    assert outlook.tokens_left == pytest.approx(20 * 18.0 + 10 * 36.0)
    assert outlook.epochs_left == pytest.approx(20 / 30 + 10 / 20)


def test_a_plan_that_holds_together_gets_no_note() -> None:
    assert notes(horizon(), total=15) == []


def test_what_the_user_may_not_expect() -> None:
    (cut,) = notes(horizon(total_steps=150), total=150)
    assert "ends at step 15, before the schedule does at 150" in cut
    assert any("before its warm-up" in note for note in notes(horizon(total_steps=150), total=150, warmup=0.5))
    assert any("no validation data" in note for note in notes(horizon(), total=15, has_validation=False))
    assert any("GiB free" in note for note in notes(horizon(), total=15, num_parameters=10**18))


BASE = BertConfig(vocab_size=64, hidden_size=128, num_attention_heads=2)
BIGBIRD = replace(BASE, sparse_attention=SparseAttention.from_dict({"mode": "bigbird"}))


@pytest.mark.parametrize(
    ("config", "precision", "device", "capability", "words"),
    [
        (BASE, "fp16", "cuda", (8, 0), "by 'sdpa', on padding too, because the faster 'varlen' has no dropout"),
        (BIGBIRD, "fp32", "cuda", (8, 0), "by 'plain', on padding too, because the faster 'flex' has no dropout"),
        (replace(BASE, attention_probs_dropout_prob=0.0), "fp16", "cuda", (8, 0), None),
        (replace(BASE, attention_backend="sdpa"), "fp16", "cuda", (8, 0), None),  # the user's own choice
        (BASE, "fp32", "cuda", (8, 0), None),  # varlen would not run anyway
        (BASE, "fp16", "cuda", (7, 5), None),
        (replace(BIGBIRD, position_embedding_type="relative_key"), "fp16", "cuda", (8, 0), None),
        (BASE, "fp32", "cpu", None, None),
    ],
)
def test_what_attention_dropout_costs_a_gpu_is_said(
    config: BertConfig, precision: str, device: str, capability: tuple[int, int] | None, words: str | None
) -> None:
    found = find_attention_notes(config, precision, device, capability)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
    assert words is None or "attention_probs_dropout_prob is 0.1; 0 in the model JSON makes it faster" in found[0]
    assert words is None or ("'jagged'" in found[0]) != config.is_sparse


def test_with_a_time_budget_steps_say_nothing_of_the_warm_up() -> None:
    assert notes(horizon(total_steps=2**62), total=150, warmup=0.5) == []


def test_data_that_ends_before_the_time_budget_does() -> None:
    schedule = Schedule("linear", peak=1.0, total_steps=150, warmup_proportion=0.1)
    budget = Budget(100.0, clock=lambda: 0.0)
    text = find_early_end(horizon(), schedule, budget, seconds_to_last_step=48.5)
    assert "in about 0:48" in str(text)
    assert "56% of the peak" in str(text)
    assert find_early_end(horizon(), schedule, budget, seconds_to_last_step=98.0) is None
    assert find_early_end(horizon(), schedule, Budget(None), seconds_to_last_step=1.0) is None
    assert find_early_end(horizon(max_steps=9), schedule, budget, seconds_to_last_step=1.0) is None


def test_numbers_for_people() -> None:
    assert [format_count(n) for n in (12, 1234, 5.6e6, 7.8e9, 1e12)] == ["12", "1.2 k", "5.6 M", "7.8 G", "1.0 T"]

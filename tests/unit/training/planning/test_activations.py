"""Predicted activations against the tensors that the model really keeps for its backward pass."""

from typing import Any

import pytest

from nvidia.checkpointing import Checkpointing
from tests.unit.training.planning.measuring import (
    as_on_a_gpu,
    build_model,
    make_batch,
    small_batch,
    small_config,
    stored_bytes,
)
from training.planning.memory import estimate_activations
from training.planning.workload import plan_execution

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {"hidden_act": "geglu", "position_embedding_type": "rotary", "attention_window": 16, "use_bias": False,
          "global_attention_every": 2, "type_vocab_size": 0}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "sdpa": NO_DROPOUT,
    "plain": {"attention_backend": "plain"},
    "plain, no dropout": {**NO_DROPOUT, "attention_backend": "plain"},
    "geglu": {"hidden_act": "geglu"},
    "no sentence head": {"sentence_head": "none"},
    "modern": {**NO_DROPOUT, **MODERN},
    "query and key norms": {**NO_DROPOUT, "qk_norm": True},
}
CHOICES = [
    Checkpointing(activation=True),
    Checkpointing(attention=True),
    Checkpointing(norm=True),
    Checkpointing(activation=True, attention=True, norm=True),
    Checkpointing(layers=2),
]


@pytest.mark.parametrize("is_pre_ln", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_pass_stores(name: str, precision: str, is_pre_ln: bool) -> None:
    config = small_config(**MODELS[name])
    execution = plan_execution(config, precision, "cpu", None, is_pre_ln)
    measured = stored_bytes(build_model(config, precision, is_pre_ln=is_pre_ln), make_batch())
    assert estimate_activations(config, small_batch(), execution)[0] == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_is_left_when_some_is_recomputed(choice: Checkpointing, precision: str, backend: str) -> None:
    config = small_config(attention_backend=backend)
    execution = plan_execution(config, precision, "cpu", None, True, choice)
    measured = stored_bytes(build_model(config, precision, choice=choice), make_batch())
    assert estimate_activations(config, small_batch(), execution)[0] == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {**NO_DROPOUT, "attention_backend": "sdpa"}, {"attention_backend": "plain"}])
@pytest.mark.parametrize("choice", [Checkpointing(), CHOICES[3]], ids=str)
def test_the_form_for_devices_keeps_masks_and_padded_rows(
    choice: Checkpointing, changes: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(**changes)
    execution = plan_execution(config, precision, "cuda", None, True, choice)
    model = build_model(config, precision, "meta", choice=choice)
    with as_on_a_gpu(monkeypatch):
        measured = stored_bytes(model, make_batch(device="meta"))
    assert estimate_activations(config, small_batch(), execution)[0] == pytest.approx(measured, rel=0.01)


def test_recomputing_more_stores_less_and_never_raises_the_peak() -> None:
    config, batch = small_config(num_hidden_layers=12), small_batch()
    peaks = []
    for choice in (Checkpointing(), CHOICES[0], CHOICES[3], Checkpointing(layers=4), Checkpointing(layers=1)):
        execution = plan_execution(config, "bf16", "cuda", (9, 0), True, choice)
        stored, workspace = estimate_activations(config, batch, execution)
        assert workspace >= 0
        peaks.append(stored + workspace)
    assert peaks == sorted(peaks, reverse=True)

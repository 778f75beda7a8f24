"""The DeepSpeed JSON: batch arithmetic, unknown keys, precision."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Problems, UserError
from training.engine.json_blocks import KEYS_WITHOUT_EFFECT
from training.settings.deepspeed_file import KNOWN_KEYS, BatchSizes, _resolve_batch, load_deepspeed_file


def load(tmp_path: Path, world_size: int = 1, **content: Any) -> Any:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return load_deepspeed_file(path, world_size)


@given(micro=st.integers(1, 64), accumulation=st.integers(1, 32), ranks=st.integers(1, 16))
def test_any_two_numbers_give_the_third(micro: int, accumulation: int, ranks: int) -> None:
    whole = {
        "train_batch_size": micro * accumulation * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for missing in (None, *whole):
        content = {key: value for key, value in whole.items() if key != missing}
        expected = BatchSizes(micro, accumulation, micro * accumulation * ranks)
        assert _resolve_batch(content, Path("ds.json"), ranks, Problems()) == expected


def test_the_numbers_that_would_work_are_named(tmp_path: Path) -> None:
    """As an elastic run needs them that has lost a machine."""
    with pytest.raises(
        UserError, match=r"With 3 ranks, train_batch_size 6 or 9 would work; with 8 rows, 1, 2, 4, 8 ranks"
    ):
        load(tmp_path, 3, train_batch_size=8)
    with pytest.raises(UserError, match=r"train_batch_size 12 would work; with 8 rows, 1, 2 ranks would"):
        load(tmp_path, 3, train_batch_size=8, train_micro_batch_size_per_gpu=4)


def test_contradictions_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_batch_size 10 is not micro batch 4 × accumulation 2 × 2 ranks"):
        load(
            tmp_path,
            2,
            train_batch_size=10,
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=2,
        )
    with pytest.raises(UserError, match="train_batch_size 3 "):
        load(tmp_path, 2, train_batch_size=3)
    with pytest.raises(UserError, match="neither train_batch_size nor"):
        load(tmp_path, gradient_accumulation_steps=3)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, train_batch_size=8, zero_optimisation={}, scheduler={}, gradient_clipping=-1)
    message = str(caught.value)
    assert "3 problems" in message
    assert "unknown key 'zero_optimisation'; did you mean 'zero_optimization'?" in message
    assert "'scheduler' cannot be used here" in message
    assert "gradient_clipping: found -1, expected a number of at least 0" in message


class Recorder(dict[str, Any]):
    """A dictionary that records which keys were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_known_keys_are_those_that_deepspeed_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    recorder = Recorder({"train_batch_size": 1})
    DeepSpeedConfig(recorder)
    gone = {"eigenvalue", "graph_harvesting", "quantize_training"}  # read only to be refused
    assert recorder.read - gone == KNOWN_KEYS


def test_engine_config_is_explicit(tmp_path: Path) -> None:
    file = load(tmp_path, 2, train_batch_size=16, fp16={"enabled": True, "initial_scale_power": 8})
    assert file.wanted_precision == "fp16"
    half, full = file.for_engine("fp16"), file.for_engine("fp32")
    assert half["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert "fp16" not in full
    assert full["gradient_clipping"] == 1.0
    assert (full["train_micro_batch_size_per_gpu"], full["gradient_accumulation_steps"]) == (8, 1)
    assert file.for_engine("bf16")["bf16"] == {"enabled": True}


def test_keys_without_effect_do_not_reach_the_engine(tmp_path: Path) -> None:
    """DeepSpeed would build another class of engine for hybrid_engine."""
    file = load(tmp_path, 1, train_batch_size=8, hybrid_engine={"enabled": True}, pipeline={"stages": 2})
    assert not file.for_engine("fp32").keys() & KEYS_WITHOUT_EFFECT.keys()


def test_the_files_that_bing_bert_ships_load(tmp_path: Path) -> None:
    half = {"enabled": True, "loss_scale": 0}
    old = {"lr": 2e-4, "max_grad_norm": 0.5, "weight_decay": 0.01, "bias_correction": False}
    adam = load(tmp_path, 64, train_batch_size=4096, optimizer={"type": "Adam", "params": old}, fp16=half)
    assert adam.for_engine("fp16")["gradient_clipping"] == 0.5
    assert "max_grad_norm" not in adam.content["optimizer"]["params"]

    trust = {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01}
    load(
        tmp_path,
        64,
        train_batch_size=65536,
        train_micro_batch_size_per_gpu=64,
        steps_per_print=100,
        prescale_gradients=False,
        optimizer={"type": "Lamb", "params": trust},
        gradient_clipping=1.0,
        wall_clock_breakdown=False,
        fp16=half,
        sparse_attention={"mode": "fixed", "block": 16, "different_layout_per_head": True},
    )

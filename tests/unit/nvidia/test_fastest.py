"""The fastest library is chosen by its time, for what is large; what is small follows a fixed rule."""

import pytest
import torch

from common.errors import UserError
from nvidia.attention import measuring
from nvidia.attention.backend import AttentionInputs, Backend
from nvidia.attention.registry import BackendContext, choose_backend
from nvidia.config import BertConfig
from nvidia.cpu.libraries import Libraries, describe_processor, forced_libraries, in_use, use
from nvidia.cpu.measuring import time_in_turns
from nvidia.fastest import measure_libraries

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
SMALL = BertConfig(vocab_size=128, hidden_size=64, num_attention_heads=2, intermediate_size=256)
LARGE = BertConfig(vocab_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024)


def test_the_best_turn_counts_and_a_slow_machine_has_two_rounds() -> None:
    times = iter([0.0, 0, 9, 10, 13, 20, 22, 30, 37, 40])  # began, then start and end of each turn, then the check
    calls: list[tuple[str, int]] = []
    candidates = {name: lambda number, name=name: calls.append((name, number)) for name in ("a", "b")}
    threads = torch.get_num_threads()
    assert time_in_turns(candidates, lambda: next(times)) == {"a": 2, "b": 3}
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert torch.get_num_threads() == threads


@needs_onednn
def test_large_products_and_attention_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvidia.fastest.time_products", lambda shapes, num_tokens, clock: {
        "forward": {"torch": 2.0, "onednn": 1.0}, "input_gradient": {"torch": 1.0, "onednn": 1.5},
    })  # fmt: skip
    monkeypatch.setattr("nvidia.fastest.time_attention", lambda *_: {"grouped": 3.0, "sdpa": 2.0})
    measured = measure_libraries(LARGE, 16, 128)
    assert measured.libraries == Libraries(forward="onednn", attention_with_dropout="sdpa")
    assert measured.describe() == (
        "forward onednn (2.00 × torch), input gradients torch (1.50 × onednn), attention sdpa (1.50 × grouped)"
    )
    without = BertConfig(**{**LARGE.to_dict(), "attention_probs_dropout_prob": 0.0, "attention_backend": "grouped"})
    assert "attention" not in measure_libraries(without, 16, 128).seconds


@needs_onednn
def test_real_candidates_compute_what_they_are_measured_for() -> None:
    state = torch.random.get_rng_state()
    measured = measure_libraries(LARGE, 32, 128)
    assert set(measured.seconds) == {"forward", "input_gradient", "weight_gradient", "attention"}
    assert all(0 < seconds < 60 for times in measured.seconds.values() for seconds in times.values())
    assert torch.equal(torch.random.get_rng_state(), state)
    head_only = BertConfig(vocab_size=8192, hidden_size=64, num_attention_heads=1, intermediate_size=256)
    assert set(measure_libraries(head_only, 32, 128).seconds) == {"forward", "input_gradient"}


@pytest.mark.parametrize(("rows", "length", "heads"), [(64, 128, 12), (1, 8192, 12), (9, 512, 2), (7, 700, 16)])
def test_the_work_of_measuring_attention_is_bounded(
    rows: int, length: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []

    def attend(qkv: torch.Tensor, inputs: AttentionInputs) -> tuple[torch.Tensor, None]:
        scores.append(sum(count * size**2 for count, size in inputs.packing.groups) * qkv.shape[2])
        return qkv[:, 0], None

    monkeypatch.setattr(measuring, "CANDIDATES", {"grouped": Backend(attend, lambda _: None)})
    assert measuring.time_attention(rows, length, heads, 4, 0.1)
    assert len(scores) in (2, 3)
    assert measuring.MAX_SCORES // 4 < scores[0] <= measuring.MAX_SCORES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_models_and_half_precision_follow_a_fixed_rule(dtype: torch.dtype) -> None:
    config, rows = (SMALL, 16) if dtype == torch.float32 else (LARGE, 64)
    measured = measure_libraries(config, rows, 128, dtype)
    assert (measured.libraries, measured.seconds, measured.describe()) == (Libraries(), {}, "")


def test_auto_attention_is_the_one_that_was_chosen() -> None:
    before, context = in_use(), BackendContext("cpu", torch.float32, 64)
    try:
        for with_dropout, without in (("grouped", "sdpa"), ("sdpa", "grouped")):
            use(Libraries(attention_with_dropout=with_dropout, attention_without_dropout=without))  # type: ignore[arg-type]
            assert choose_backend("auto", context) == without
            assert choose_backend("auto", context._replace(dropout_prob=0.1)) == with_dropout
            assert choose_backend("auto", context._replace(needs_plain=True)) == "plain"
    finally:
        use(before)


@needs_onednn
def test_an_environment_variable_forces_the_library() -> None:
    assert forced_libraries({}) is None
    assert forced_libraries({"CPU_PRODUCTS": "measured"}) is None
    assert forced_libraries({"CPU_PRODUCTS": "torch"}) == Libraries()
    assert forced_libraries({"CPU_PRODUCTS": "onednn"}) == Libraries("onednn", "onednn", "onednn")
    with pytest.raises(UserError, match="CPU_PRODUCTS: found 'mkl', expected 'measured', 'torch' or"):
        forced_libraries({"CPU_PRODUCTS": "mkl"})


def test_the_kind_of_processor_depends_on_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    here = describe_processor()
    features = torch.cpu.get_capabilities()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**features, "num_logical_cores": 99})
    assert describe_processor() == here
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**features, "avx2": not features.get("avx2")})
    assert describe_processor() != here

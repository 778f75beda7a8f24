"""The fastest library is chosen by its time, for what is large; what is small follows a fixed rule."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from common.errors import UserError
from nvidia.attention import measuring
from nvidia.attention.backend import AttentionInputs, Backend
from nvidia.attention.registry import BackendContext, choose_backend
from nvidia.config import BertConfig
from nvidia.cpu import openblas
from nvidia.cpu.libraries import Libraries, describe_processor, forced_libraries, in_use, use
from nvidia.cpu.linear import Role
from nvidia.cpu.measuring import MAX_ROUNDS, time_in_turns
from nvidia.fastest import measure_libraries

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
ROLES = get_args(Role)
SMALL = BertConfig(vocab_size=128, hidden_size=64, num_attention_heads=2, intermediate_size=256)
LARGE = BertConfig(vocab_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024)


def test_the_best_turn_counts_and_candidates_that_are_far_behind_take_no_other() -> None:
    seconds = {"a": [0.05, 0.02, 0.021], "b": [0.04, 0.06, 0.022], "slow": [0.1, 0.04], "hopeless": [0.13]}
    now, calls = 0.0, []

    def work(name: str, number: int) -> None:
        nonlocal now
        now += seconds[name][number]
        calls.append((name, number))

    candidates = {name: partial(work, name) for name in seconds}
    found = time_in_turns(candidates, lambda: now)
    assert found == pytest.approx({"a": 0.02, "b": 0.04, "slow": 0.04, "hopeless": 0.13})
    both = [("a", 1), ("b", 1)]
    assert calls == [*[(name, 0) for name in seconds], *both, ("slow", 1)]  # then the time is up


@pytest.mark.parametrize(("turns", "expected"), [([9, 5, 5.2, 1], 3), ([9, 5, 7, 9, 5.1, 1], 5), ([5, 5.1], 2)])
def test_there_are_turns_until_two_agree(turns: list[float], expected: int) -> None:
    now, left = 0.0, iter(turns)

    def work(_: int) -> None:
        nonlocal now
        now += next(left) / 1000

    assert time_in_turns({"only": work}, lambda: now) == {"only": pytest.approx(0.005)}
    assert len(list(left)) == len(turns) - expected


@needs_onednn
def test_large_products_and_attention_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    products = {"forward": {"torch": 2.0, "onednn": 1.0}, "input_gradient": {"torch": 1.0, "onednn": 1.5}}
    attention = {"grouped": 3.0, "sdpa": 2.0}
    monkeypatch.setattr("nvidia.fastest.time_products", lambda shapes, num_tokens, clock: products)
    monkeypatch.setattr("nvidia.fastest.time_attention", lambda *_: attention)
    measured = measure_libraries(LARGE, 16, 128)
    assert measured.libraries == Libraries(forward="onednn", attention_with_dropout="sdpa")
    assert measured.describe() == (
        "forward onednn (2.00 × torch), input gradients torch (1.50 × onednn), attention sdpa (1.50 × grouped)"
    )
    products["forward"]["openblas"] = 1.25
    products["input_gradient"]["openblas"] = 1.5  # 2.75 in all, where torch takes 3
    expected = Libraries("onednn", others="openblas", attention_with_dropout="sdpa")
    assert measure_libraries(LARGE, 16, 128).libraries == expected
    attention.clear()  # a batch whose attention is too small to be measured
    assert measure_libraries(LARGE, 16, 128).libraries == replace(expected, attention_with_dropout="grouped")
    without = BertConfig(**{**LARGE.to_dict(), "attention_probs_dropout_prob": 0.0, "attention_backend": "grouped"})
    attention["sdpa"] = 1.0
    assert "attention" not in measure_libraries(without, 16, 128).seconds


@needs_onednn
@pytest.mark.parametrize("kernels", [None, "Haswell"])
def test_real_candidates_compute_what_they_are_measured_for(
    kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is not None and not openblas.is_available():
        pytest.skip("a numpy without OpenBLAS")
    monkeypatch.setattr(openblas, "kernels", lambda: kernels)
    state, before, with_openblas = torch.random.get_rng_state(), in_use(), kernels is not None
    measured = measure_libraries(LARGE, 32, 128)
    assert set(measured.seconds) == {*ROLES, "attention"}
    assert set(measured.seconds["forward"]) == {"torch", "onednn", *["openblas"] * with_openblas}
    assert set(measured.seconds["attention"]) == {"grouped", "sdpa"}
    assert all(0 < seconds < 60 for times in measured.seconds.values() for seconds in times.values())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert in_use() == before
    head_only = BertConfig(vocab_size=8192, hidden_size=64, num_attention_heads=1, intermediate_size=256)
    of_head = measure_libraries(head_only, 32, 128).seconds
    assert set(of_head) == ({*ROLES} if with_openblas else {"forward", "input_gradient", "weight_gradient"})
    assert set(of_head["forward"]) == {"torch", "openblas" if with_openblas else "onednn"}
    narrow = BertConfig(vocab_size=128, hidden_size=128, num_attention_heads=2, intermediate_size=512)
    expected = {"torch", "openblas"} if with_openblas else set()  # too small for oneDNN
    found = measure_libraries(narrow, 16, 128).seconds
    assert all(set(found.get(role, {})) == expected for role in ROLES)


@pytest.mark.parametrize(("rows", "length", "heads"), [(64, 128, 12), (1, 8192, 12), (9, 512, 2), (7, 700, 16)])
def test_the_work_of_measuring_attention_is_bounded(
    rows: int, length: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []

    def attend(qkv: torch.Tensor, inputs: AttentionInputs) -> tuple[torch.Tensor, None]:
        scores.append(sum(count * size**2 for count, size in inputs.packing.groups) * qkv.shape[2])
        return qkv[:, 0], None

    monkeypatch.setattr(measuring, "BACKENDS", dict.fromkeys(("grouped", "sdpa"), Backend(attend, lambda _: None)))
    candidates = measuring.time_attention(rows, length, heads, 4, 0.1)
    first, timed = scores[: len(candidates)], scores[len(candidates) :]
    assert set(first) == {heads_measured := first[0]}  # a token each, to load what is loaded once
    assert heads_measured <= heads
    assert len(candidates) < len(timed) <= MAX_ROUNDS * len(candidates)
    most = measuring.MAX_SCORES * torch.get_num_threads()
    assert most // 4 < timed[0] <= most


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
def test_an_environment_variable_forces_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forced_libraries({}) is None
    assert forced_libraries({"CPU_PRODUCTS": "measured"}) is None
    assert forced_libraries({"CPU_PRODUCTS": "torch"}) == Libraries()
    assert forced_libraries({"CPU_PRODUCTS": "onednn"}) == Libraries(*["onednn"] * 4)
    with pytest.raises(UserError, match="CPU_PRODUCTS: found 'mkl', expected 'measured', 'torch' or"):
        forced_libraries({"CPU_PRODUCTS": "mkl"})
    for kernels, expected in (("Zen", Libraries(*["openblas"] * 5)), (None, None)):
        monkeypatch.setattr(openblas, "kernels", lambda kernels=kernels: kernels)
        with nullcontext() if expected else pytest.raises(UserError, match="where they can be used"):
            assert forced_libraries({"CPU_PRODUCTS": "openblas"}) == expected


def test_the_kind_of_processor_depends_on_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    here = describe_processor()
    features = torch.cpu.get_capabilities()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**features, "num_logical_cores": 99})
    assert describe_processor() == here
    with monkeypatch.context() as changed:
        changed.setattr(openblas, "kernels", lambda: "SomethingElse")
        assert describe_processor() != here
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**features, "avx2": not features.get("avx2")})
    assert describe_processor() != here

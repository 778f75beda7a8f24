"""Which backend runs in which context, and the reasons why one cannot."""

import pytest
import torch

from common.errors import UserError
from nvidia.attention.registry import BackendContext, choose_backend, cuda_capability

HALF = BackendContext("cuda", torch.float16, head_size=64)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (BackendContext("cpu", torch.float32, 64, dropout_prob=0.1), "grouped"),
        (BackendContext("cpu", torch.bfloat16, 64, dropout_prob=0.1), "grouped"),
        (BackendContext("cpu", torch.float32, 64), "grouped"),
        (BackendContext("cpu", torch.float32, 64, needs_plain=True), "plain"),
        (BackendContext("cpu", torch.float32, 64, dropout_prob=0.1, is_sparse=True), "plain"),
        (HALF, "varlen"),
        (HALF._replace(dtype=torch.bfloat16), "varlen"),
        (HALF._replace(dropout_prob=0.1), "sdpa"),
        (HALF._replace(dtype=torch.float32), "sdpa"),
        (HALF._replace(is_sparse=True), "flex"),
        (HALF._replace(is_sparse=True, dropout_prob=0.1), "plain"),
        (HALF._replace(is_sparse=True, needs_plain=True), "plain"),
        # Requirements of the kernels: varlen is FlashAttention-2, flex is compiled by Triton.
        (HALF._replace(capability=(8, 0)), "varlen"),
        (HALF._replace(capability=(12, 0)), "varlen"),
        (HALF._replace(capability=(7, 5)), "sdpa"),
        (HALF._replace(head_size=256), "varlen"),
        (HALF._replace(head_size=264), "sdpa"),
        (HALF._replace(head_size=36), "sdpa"),
        (HALF._replace(head_size=8), "varlen"),
        (HALF._replace(head_size=16, is_sparse=True), "flex"),
        (HALF._replace(head_size=8, is_sparse=True), "plain"),
        (HALF._replace(is_sparse=True, capability=(7, 0)), "flex"),
        (HALF._replace(is_sparse=True, capability=(6, 1)), "plain"),
    ],
)
def test_auto_takes_the_most_preferred_backend_that_can_run(context: BackendContext, expected: str) -> None:
    assert choose_backend("auto", context) == expected


@pytest.mark.parametrize(
    ("name", "context", "reason"),
    [
        ("grouped", HALF, "is for CPUs, but the model is on cuda"),
        (
            "varlen",
            BackendContext("cpu", torch.float32, 64),
            "needs fp16 or bf16 on a CUDA device, but the model is float32 on cpu",
        ),
        (
            "varlen",
            HALF._replace(dropout_prob=0.1),
            "dropout, but attention_probs_dropout_prob is 0.1",
        ),
        ("varlen", HALF._replace(capability=(7, 5)), r"needs compute capability 8.0, but this device has 7.5"),
        ("varlen", HALF._replace(head_size=20), "in multiples of 8, but it is 20"),
        ("flex", HALF._replace(dropout_prob=0.1), "does not support dropout"),
        ("flex", HALF._replace(head_size=12), "of at least 16, but it is 12"),
        ("flex", BackendContext("cpu", torch.float32, 64), "has no backward pass on CPUs"),
        ("jagged", HALF._replace(dtype=torch.float32), "needs fp16 or bf16 on a CUDA device"),
        ("jagged", HALF._replace(capability=(7, 5)), r"needs compute capability 8.0"),
        ("jagged", HALF._replace(is_sparse=True), "does not support sparse layouts"),
    ],
)
def test_a_backend_that_cannot_run_is_rejected_with_the_reason(name: str, context: BackendContext, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        choose_backend(name, context)


def test_jagged_runs_only_by_name_with_dropout_too() -> None:
    for context in (HALF, HALF._replace(dropout_prob=0.1), BackendContext("cpu", torch.float32, 64, dropout_prob=0.1)):
        assert choose_backend("jagged", context) == "jagged"
        assert choose_backend("auto", context) != "jagged"


@pytest.mark.parametrize("name", ["grouped", "sdpa", "varlen", "flex", "jagged"])
def test_other_backends_reject_the_options_of_the_plain_formula(name: str) -> None:
    with pytest.raises(UserError, match="relative positions, head masks"):
        choose_backend(name, BackendContext("cpu", torch.float32, 64, needs_plain=True))


def test_capability_is_read_from_present_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_present in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_present=is_present: is_present)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, device.index))
        cuda_capability.cache_clear()
        assert cuda_capability(torch.device("cuda", 1)) == ((7, 1) if is_present else None)
        assert cuda_capability(torch.device("cpu")) is None
    cuda_capability.cache_clear()

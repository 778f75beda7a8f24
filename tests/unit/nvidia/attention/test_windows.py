"""Attention windows: each backend against the plain formula, at odd sizes and for odd packings."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nvidia.attention import flex, grouped, plain, sdpa, varlen
from nvidia.attention.backend import AttentionInputs, BackendContext, in_window
from nvidia.attention.registry import choose_backend
from nvidia.checkpointing import Checkpointing
from nvidia.cpu.dropout import draw_seed
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.unpadding import make_packing, plan_packing
from tests.unit.nvidia.attention.test_grouped import assert_near, divide_finely, random_tensor, value_and_gradients
from tests.unit.nvidia.helpers import (
    kept_elements,
    largest_difference,
    make_batch,
    packing_of,
    spread_weights,
    tiny_config,
)

LENGTHS, WIDTH = (37, 9, 1, 37, 20, 2), 41
MASK = make_batch(LENGTHS, WIDTH)[2].bool()


def written_out(qkv: Tensor, mask: Tensor, window: int) -> Tensor:
    """Token by token: [T, 3, A, D] in batch order → [T, A, D]"""
    contexts, start = [], 0
    for length in mask.sum(1).tolist():
        q, k, v = qkv[start : start + length].unbind(1)
        for position in range(length):
            seen = slice(max(0, position - window // 2), position + window // 2 + 1)
            scores = torch.einsum("ad,kad->ak", q[position], k[seen]) / q.shape[-1] ** 0.5
            contexts.append(torch.einsum("ak,kad->ad", scores.softmax(-1), v[seen]))
        start += length
    return torch.stack(contexts)


@pytest.mark.parametrize("window", [2, 7, 36, 80])
def test_the_plain_formula_is_the_written_out_one_with_holes_in_the_mask_too(window: int) -> None:
    """A window counts real tokens; a hole in the mask does not make it narrower."""
    holes = MASK.clone()
    holes[0, 5:8] = holes[3, 0] = False
    packing = make_packing(holes, torch.nonzero(holes.flatten()).squeeze(1))
    qkv = random_tensor(packing.num_tokens, 3, 3, 8)
    expected = value_and_gradients(lambda x: written_out(x, holes, window), qkv)
    for backend in (plain, sdpa):
        ours = value_and_gradients(lambda x, b=backend: b.attend(x, AttentionInputs(packing, window=window))[0], qkv)
        assert_near(ours, expected)


@pytest.mark.parametrize("window", [2, 7, 16, 73, 80])
@pytest.mark.parametrize(("tile", "queries"), [(1 << 16, 64), (200, 5), (1, 1)])
def test_grouped_sdpa_and_flex_equal_the_plain_formula(
    tile: int, queries: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = plan_packing(MASK)
    qkv, inputs = random_tensor(packing.num_tokens, 3, 3, 8), AttentionInputs(packing, window=window)
    expected = value_and_gradients(lambda x: plain.attend(x, inputs)[0], qkv)
    divide_finely(monkeypatch, tile, queries)
    for backend in (grouped, sdpa):
        assert_near(value_and_gradients(lambda x, b=backend: b.attend(x, inputs)[0], qkv), expected)
    with torch.no_grad():
        assert largest_difference(flex.attend(qkv, inputs)[0], expected[0]) <= 1e-5


@pytest.mark.parametrize("window", [0, 2, 7, 36, 80])
@pytest.mark.parametrize("rows", [[0, 36, 40, 73, 90, 93, 96, 104], [38, 39], list(range(53))])
@pytest.mark.parametrize("backend", [sdpa, grouped])
def test_some_queries_get_the_context_that_the_plain_formula_gives_them(
    backend: ModuleType, rows: list[int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of some sequences, of none but one, and many more of the longest than of the others."""
    divide_finely(monkeypatch, 200, 5)
    packing, chosen = plan_packing(MASK), torch.tensor(rows)
    counts = torch.histc(chosen.float(), bins=packing.num_tokens, min=0, max=packing.num_tokens).long()
    counts = [int(part.sum()) for part in counts.split(packing.boundaries.diff().tolist())]
    q, kv = random_tensor(packing.num_tokens, 3, 8), random_tensor(packing.num_tokens, 2, 3, 8, seed=2)
    inputs = AttentionInputs(packing, window=window, rows=chosen)

    def of_all(q: Tensor, kv: Tensor) -> Tensor:
        return plain.attend(torch.cat([q.unsqueeze(1), kv], 1), inputs)[0].index_select(0, chosen)

    def of_some(q: Tensor, kv: Tensor) -> Tensor:
        return backend.attend_some(q.index_select(0, chosen), kv, inputs, counts)

    assert_near(value_and_gradients(of_some, q, kv), value_and_gradients(of_all, q, kv))


def test_dropout_with_a_window_has_the_masks_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_finely(monkeypatch, 200, 5)
    qkv = random_tensor(40, 3, 2, 8)
    torch.manual_seed(5)
    packing, inputs = packing_of(40), AttentionInputs(packing_of(40), 0.4, window=8)
    ours = value_and_gradients(lambda x: grouped.attend(x, inputs)[0], qkv)
    torch.manual_seed(5)
    mask = kept_elements(draw_seed(), 2 * 40, 40, 0.4).view(2, 40, 40) / 0.6
    seen = in_window(packing.position_of, 8)

    def formula(x: Tensor) -> Tensor:
        q, k, v = x.permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~seen, -math.inf)
        return ((scores.softmax(-1) * mask) @ v).transpose(0, 1)

    assert_near(ours, value_and_gradients(formula, qkv), 1e-4)


def test_dropout_drops_probabilities_inside_the_window_and_scales_the_others() -> None:
    length = 64
    qkv = random_tensor(length, 3, 5, length)
    qkv[:, 2] = torch.eye(length)[:, None]  # with these values the context is the probabilities
    torch.manual_seed(0)
    dropped, _ = grouped.attend(qkv, AttentionInputs(packing_of(length), 0.25, window=10))
    exact, _ = grouped.attend(qkv, AttentionInputs(packing_of(length), window=10))
    kept = dropped > 0
    assert largest_difference(dropped[kept], exact[kept] / 0.75) <= 1e-4
    assert (exact > 0).sum() == 5 * (length * 11 - 30)
    assert 1 - float(kept.sum() / (exact > 0).sum()) == pytest.approx(0.25, abs=0.03)


HALF = BackendContext("cuda", torch.bfloat16, 64, has_window=True)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (BackendContext("cpu", torch.float32, 64, has_window=True), "grouped"),
        (BackendContext("cpu", torch.float32, 64, has_window=True, dropout_prob=0.1), "grouped"),
        (BackendContext("cpu", torch.float32, 64, has_window=True, has_wide_window=True), "grouped"),
        (BackendContext("cpu", torch.float32, 64, 0.1, has_window=True, has_wide_window=True), "grouped"),
        (HALF, "varlen"),
        (HALF._replace(dtype=torch.float32), "flex"),
        (HALF._replace(capability=(7, 5)), "flex"),
        (HALF._replace(capability=(6, 1)), "sdpa"),
        (HALF._replace(dropout_prob=0.1), "sdpa"),
        (HALF._replace(needs_plain=True), "plain"),
    ],
)
def test_auto_prefers_backends_that_skip_what_the_window_hides(context: BackendContext, expected: str) -> None:
    assert choose_backend("auto", context) == expected


def test_varlen_gets_the_window_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen as kernel

    seen = []
    monkeypatch.setattr(kernel, "varlen_attn", lambda q, *others, window_size: seen.append(window_size) or q)
    packing = plan_packing(MASK)
    for window in (0, 128, 7):
        varlen.attend(random_tensor(packing.num_tokens, 3, 1, 8), AttentionInputs(packing, window=window))
    assert seen == [(-1, -1), (64, 64), (3, 3)]


@pytest.mark.parametrize("choice", [Checkpointing(), Checkpointing(layers=2), Checkpointing(attention=True, norm=True)])
@pytest.mark.parametrize("norm", [False, True])
def test_a_model_with_windows_rotary_positions_and_norms_is_the_same_in_each_backend(
    norm: bool, choice: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "_MIN_SKIPPED", 0)  # so that the last block skips queries
    results = []
    for backend in ("plain", "grouped"):
        model = BertForPreTrainingPreLN(
            tiny_config(attention_backend=backend, num_hidden_layers=4, max_position_embeddings=WIDTH, qk_norm=norm,
                        attention_window=7, global_attention_every=3, position_embedding_type="rotary")
        )  # fmt: skip
        model.set_checkpointing(choice)
        spread_weights(model)
        loss = model(make_batch(LENGTHS, WIDTH))
        loss.backward()
        results.append((loss, *[parameter.grad for parameter in model.parameters()]))
    assert_near(results[1], results[0])

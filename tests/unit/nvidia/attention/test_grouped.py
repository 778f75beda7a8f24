"""Attention by compiled loops on a CPU: results and gradients equal the formula, however the work is divided."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nvidia.attention import grouped, sdpa
from nvidia.attention.backend import AttentionInputs
from nvidia.checkpointing import Checkpointing
from nvidia.cpu.dropout import draw_seed
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import Packing, plan_packing
from tests.unit.nvidia.helpers import (
    kept_elements,
    largest_difference,
    make_batch,
    packing_of,
    spread_weights,
    tiny_config,
)

ALWAYS, NEVER = 0, 1 << 40  # scores of a batch from which on queries are skipped


def attend(qkv: Tensor, packing: Packing, dropout: float = 0.0, window: int = 0) -> Tensor:
    return grouped.attend(qkv, AttentionInputs(packing, dropout, window))[0]


def attend_some(q: Tensor, kv: Tensor, packing: Packing, rows: list[int], dropout: float = 0.0) -> Tensor:
    """`q` [U, A, D] are the queries at the packed positions `rows`."""
    starts = packing.boundaries.tolist()
    counts = [sum(start <= row < stop for row in rows) for start, stop in pairwise(starts)]
    return grouped.attend_some(q, kv, AttentionInputs(packing, dropout, rows=torch.tensor(rows)), counts)


def divide_finely(monkeypatch: pytest.MonkeyPatch, tile: int, min_rows: int = 1) -> None:
    """Tiles of few scores, and of at least `min_rows` queries."""
    monkeypatch.setattr(grouped, "_TILE", tile)
    monkeypatch.setattr(grouped, "WINDOW_QUERIES", min_rows)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value_and_gradients(compute: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result of `compute`, and the gradients of a weighted sum of it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    value = compute(*leaves)
    value.backward(random_tensor(*value.shape, seed=1).to(value.dtype))
    assert all(torch.equal(leaf, tensor) for leaf, tensor in zip(leaves, inputs, strict=True))
    return value, *[leaf.grad for leaf in leaves]


def assert_near(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float = 1e-5) -> None:
    assert len(ours) == len(expected)
    assert [largest_difference(*pair) <= bound for pair in zip(ours, expected, strict=True)] == [True] * len(ours)


@pytest.mark.parametrize("min_rows", [1, 4])
@pytest.mark.parametrize("tile", [1, 30, 1 << 16])
def test_the_size_of_tiles_does_not_change_the_result(
    tile: int, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = plan_packing(make_batch()[2].bool())
    qkv = random_tensor(packing.num_tokens, 3, 3, 8)
    expected = value_and_gradients(lambda x: sdpa.attend(x, AttentionInputs(packing))[0], qkv)
    divide_finely(monkeypatch, tile, min_rows)
    assert_near(value_and_gradients(lambda x: attend(x, packing), qkv), expected)


def dropped_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[A, R, D], [A, L, D] twice, and a scaled mask [A, R, L] → [R, A, D]"""
    probabilities = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return ((probabilities * mask) @ v).transpose(0, 1)


@pytest.mark.parametrize("tile", [1, 30, 1 << 16])
def test_attention_with_dropout_equals_the_formula_with_its_mask(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks are a function of the seed, the head, the query and the key: not of the tiles."""
    divide_finely(monkeypatch, tile)
    qkv, lengths = random_tensor(12, 3, 3, 8), [7, 5]
    torch.manual_seed(5)
    ours = value_and_gradients(lambda x: attend(x, packing_of(*lengths), 0.4), qkv)
    torch.manual_seed(5)
    mask = kept_elements(draw_seed(), 3 * 12, 7, 0.4).view(3, 12, 7) / 0.6
    assert 0 < int((mask == 0).sum()) < mask.numel()

    def formula(x: Tensor) -> Tensor:
        sequences = zip(x.permute(1, 2, 0, 3).split(lengths, 2), mask.split(lengths, 1), strict=True)
        return torch.cat([dropped_formula(*qkv, mask[..., : mask.shape[1]]) for qkv, mask in sequences])

    assert_near(ours, value_and_gradients(formula, qkv), 1e-4)  # the rate is rounded to 1/65536


@pytest.mark.parametrize("tile", [1, 30, 1 << 16])
def test_some_queries_get_the_same_context_as_among_all(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, none and all of the queries of three sequences."""
    packing, rows = packing_of(6, 6, 3), [1, 5, 12, 13, 14]
    chosen = torch.tensor(rows)
    q, kv = random_tensor(15, 3, 8), random_tensor(15, 2, 3, 8, seed=2)
    together = value_and_gradients(
        lambda q, kv: attend(torch.cat([q.unsqueeze(1), kv], 1), packing).index_select(0, chosen), q, kv
    )
    divide_finely(monkeypatch, tile)
    context, q_gradient, kv_gradient = value_and_gradients(
        lambda q, kv: attend_some(q, kv, packing, rows), q.index_select(0, chosen), kv
    )
    assert_near((context, torch.zeros_like(q).index_copy(0, chosen, q_gradient), kv_gradient), together)
    assert not kv_gradient[6:12].any()


def test_some_queries_get_the_dropout_of_the_formula() -> None:
    q, kv = random_tensor(3, 2, 8), random_tensor(5, 2, 2, 8, seed=2)
    torch.manual_seed(5)
    ours = value_and_gradients(lambda q, kv: attend_some(q, kv, packing_of(5), [0, 1, 4], 0.4), q, kv)
    torch.manual_seed(5)
    mask = kept_elements(draw_seed(), 2 * 3, 5, 0.4).view(2, 3, 5) / 0.6
    expected = value_and_gradients(
        lambda q, kv: dropped_formula(q.transpose(0, 1), *kv.permute(1, 2, 0, 3), mask), q, kv
    )
    assert_near(ours, expected, 1e-4)


def test_probabilities_far_below_the_largest_are_zero_and_not_denormal() -> None:
    """Products that meet denormal numbers take thirty times as long."""
    context, _ = one_head_with_scores(torch.tensor([0.0, -40.0, -50.0, -90.0]))
    torch.testing.assert_close(context, torch.tensor([1.0, 4.248354e-18, 0.0, 0.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e4, 1e12, 1e30])
def test_the_softmax_of_large_scores_is_exact(size: float) -> None:
    """In both passes: a learning rate that is far too large must not look like NaN."""
    context, gradient = one_head_with_scores(torch.tensor([-size, size, size, 0.3 * size]))
    assert torch.equal(context, torch.tensor([0.0, 0.5, 0.5, 0.0]))
    assert gradient.tolist() == [0.0, 0.5, 0.5, 0.0]


def one_head_with_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of a query with these scores, and the gradient of the values for an output gradient of 1."""
    qkv = torch.zeros(4, 3, 1, 4)
    qkv[0, 0, 0, 0], qkv[:, 1, 0, 0] = 2.0, scores
    qkv[:, 2, 0] = torch.eye(4)  # with these values the context is the probabilities
    context = attend(qkv.requires_grad_(), packing_of(4))
    context[0].sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()
    return context[0, 0].detach(), qkv.grad[:, 2, 0, 0]


@pytest.mark.parametrize(("value", "expected"), [(float("nan"), True), (float("inf"), True), (3e38, False)])
def test_broken_scores_are_not_hidden(value: float, expected: bool) -> None:
    """A loss must show that a model has NaN; scores that are only large have a softmax."""
    qkv = random_tensor(20, 3, 2, 4)
    qkv[13, 1, 1, 2], qkv[:, 0, 1, 2] = value, 1.0
    context = attend(qkv.requires_grad_(), packing_of(20))
    context.sum().backward()
    assert qkv.grad is not None
    assert bool(context[:, 1].isnan().all()) is bool(qkv.grad[:, 1, 1].isnan().all()) is expected
    assert context[:, 0].isfinite().all()


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_the_last_block_has_dropout_only_in_training(
    kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the attention of the last block has dropout."""
    monkeypatch.setattr(grouped, "_MIN_SKIPPED", ALWAYS)
    model = kind(tiny_config(attention_backend="grouped"))
    spread_weights(model)
    without = float(model(make_batch()))
    model.bert.encoder.layer[-1].attention.self.dropout_prob = 0.5
    losses = {float(model(make_batch())) for _ in range(5)}
    assert len(losses) == 5
    assert without not in losses
    model.eval()
    assert float(model(make_batch())) == without


@pytest.mark.parametrize("choice", [Checkpointing(), Checkpointing(layers=2), Checkpointing(attention=True)], ids=str)
@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_gradients_arrive_in_the_same_order_with_and_without_skipped_queries(
    kind: type[PreTrainingModel], choice: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may differ in whether they skip queries, and DeepSpeed reduces gradients in their order of arrival."""
    model = kind(tiny_config(attention_backend="grouped"))
    model.set_checkpointing(choice)
    came: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    orders = []
    for limit in (NEVER, ALWAYS):
        monkeypatch.setattr(grouped, "_MIN_SKIPPED", limit)
        came.clear()
        model(make_batch()).backward()
        orders.append(list(came))
    assert orders[0] == orders[1]
    assert sorted(came) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_last_block_computes_only_queries_that_are_read(
    kind: type[PreTrainingModel], dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind(tiny_config(attention_backend="grouped"))
    spread_weights(model)
    model.to(dtype)
    asked: list[int] = []

    original = grouped.list_sequences

    def spy(*arguments: object) -> grouped.Sequences:
        sequences = original(*arguments)
        asked.append(len(sequences.rows))
        return sequences

    monkeypatch.setattr(grouped, "list_sequences", spy)
    results = []
    for limit in (NEVER, ALWAYS):
        monkeypatch.setattr(grouped, "_MIN_SKIPPED", limit)
        model.zero_grad()
        loss = model(make_batch())
        loss.backward()
        results.append((loss, *[parameter.grad.clone() for parameter in model.parameters()]))
    num_tokens, num_masked, num_rows = 34, int((make_batch()[5] != -1).sum()), 5
    assert asked == [num_tokens, num_tokens, num_masked + num_rows]  # once per batch, and for the last block
    assert_near(results[1], results[0], bound)


@pytest.mark.parametrize(
    ("lengths", "heads", "num_queries", "expected"),
    [
        ((128, 100, 90), 2, 60, True),
        ((128, 100, 90), 2, 300, False),
        ((64, 64, 64), 2, 60, False),
        ((64, 64, 64), 12, 60, True),
    ],
)
def test_queries_are_skipped_where_sequences_have_many_scores(
    lengths: tuple[int, ...], heads: int, num_queries: int, expected: bool
) -> None:
    assert grouped.should_skip_queries(packing_of(*lengths), heads, num_queries, 0) is expected


def test_a_batch_without_rows_has_no_loss_and_gradients_of_zero() -> None:
    model = BertForPreTrainingPreLN(tiny_config(attention_backend="grouped"))
    kind, *tensors = make_batch()
    loss = model((kind, *(tensor[:0] for tensor in tensors)))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("lengths", "heads", "window", "expected"),
    [
        ((128,) * 16, 12, 0, [24] * 8),
        ((512, 64, 64), 2, 0, [1, 1, 4]),  # a long sequence is divided by its heads
        ((8192, 64), 12, 128, [2, 2, 1, 2, 1, 2, 1, 13]),
        ((30, 20), 2, 0, [4]),  # too small to be divided
        ((), 2, 0, []),
    ],
)
def test_parts_have_about_as_many_scores(
    lengths: tuple[int, ...], heads: int, window: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(grouped.team, "is_available", lambda: True)
    table = [[0, length, 0, length] for length in lengths]
    reach = window // 2 or sum(lengths)
    sequences = grouped.Sequences(None, torch.tensor(table).view(-1, 4).numpy(), reach)
    parts = grouped._divide(sequences, heads)
    assert [stop - first for first, stop in parts] == expected
    assert [first for first, _ in parts[1:]] == [stop for _, stop in parts[:-1]]


@pytest.mark.parametrize("window", [0, 20])
def test_the_number_of_threads_does_not_change_a_bit(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_MIN_PART", 100)
    qkv, before = random_tensor(200, 3, 3, 8), torch.get_num_threads()
    parts = []
    run = grouped.team.run
    monkeypatch.setattr(grouped.team, "run", lambda work: (parts.append(len(work)), run(work)))

    def compute(threads: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(threads)
        torch.manual_seed(5)
        return value_and_gradients(lambda x: attend(x, packing_of(*[30] * 5, 28, 22), 0.4, window), qkv)

    try:
        alone, others = compute(1), [compute(threads) for threads in (2, 3)]
    finally:
        torch.set_num_threads(before)
    assert parts[0] == 1
    assert min(parts[2:]) > 1 or not grouped.team.is_available()
    for result in others:
        assert all(torch.equal(*pair) for pair in zip(result, alone, strict=True))


def test_a_single_row_may_have_any_stride() -> None:
    qkv, weights = random_tensor(1, 3, 2, 4), random_tensor(64).as_strided((1, 2, 4), (1, 4, 1))
    odd = qkv.as_strided((1, 3, 2, 4), (1, 8, 4, 1)).requires_grad_()
    context = attend(odd, packing_of(1))
    (gradient,) = torch.autograd.grad(context, odd, weights)
    assert torch.equal(context, qkv[:, 2])
    assert torch.equal(gradient[:, 2], weights)
    assert not gradient[:, :2].any()


def test_inference_mode_computes_the_same() -> None:
    qkv, before = random_tensor(1200, 3, 4, 8), torch.get_num_threads()
    expected = attend(qkv, packing_of(*[300] * 4))
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = attend(qkv.clone(), packing_of(*[300] * 4))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def test_an_error_in_a_part_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvidia.cpu import attention_loops

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the scores")

    monkeypatch.setattr(attention_loops, "make_scratch", fail)
    with pytest.raises(MemoryError, match="no memory for the scores"):
        attend(random_tensor(600, 3, 12, 8), packing_of(300, 300))

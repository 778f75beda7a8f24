"""Attention by length on a CPU: results and gradients equal the formula, however sequences are grouped or skipped."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from nvidia.attention import grouped, runs, sdpa
from nvidia.attention.backend import AttentionInputs
from nvidia.checkpointing import Checkpointing
from nvidia.cpu import openblas
from nvidia.cpu.dropout import MaskStream, draw_seed
from nvidia.cpu.libraries import Libraries, in_use, use
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, packing_of, spread_weights, tiny_config

TOGETHER, ALONE = 1 << 17, 0  # values of runs.SHORT: all sequences together, or each by itself


@pytest.fixture(autouse=True, params=["torch", "openblas"])
def products(request: pytest.FixtureRequest) -> Generator[None]:
    """Every test by each library of products."""
    if request.param == "openblas" and not openblas.is_available():
        pytest.skip("a numpy without OpenBLAS")
    before = in_use()
    use(Libraries(attention_products=request.param))
    yield
    use(before)


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


@pytest.mark.parametrize("short", [TOGETHER, ALONE])
@pytest.mark.parametrize("tile", [1, 30, 200, 1 << 19])
def test_the_size_of_tiles_does_not_change_the_result(tile: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = plan_packing(make_batch()[2].bool())
    qkv = random_tensor(packing.num_tokens, 3, 3, 8)
    expected = value_and_gradients(lambda x: sdpa.attend(x, AttentionInputs(packing))[0], qkv)
    monkeypatch.setattr(runs, "TILE", tile)
    monkeypatch.setattr(runs, "SHORT", short)
    assert_near(value_and_gradients(lambda x: grouped.grouped_attention(x, packing, 0.0), qkv), expected)


@pytest.mark.parametrize("short", [TOGETHER, ALONE])
def test_attention_with_dropout_equals_the_formula_with_its_mask(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHORT", short)
    qkv = random_tensor(14, 3, 3, 8)
    torch.manual_seed(5)
    ours = value_and_gradients(lambda x: grouped.grouped_attention(x, packing_of(7, 7), 0.4), qkv)
    torch.manual_seed(5)
    seed, sequences = draw_seed(), [2] if short == TOGETHER else [1, 1]
    masks = [MaskStream((seed, run), 0.4).draw((3 * count, 7, 7), torch.float32) for run, count in enumerate(sequences)]
    mask = torch.cat(masks).view(2, 3, 7, 7) * MaskStream(seed, 0.4).scale
    assert 0 < int((mask == 0).sum()) < mask.numel()

    def formula(x: Tensor) -> Tensor:
        q, k, v = x.view(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
        probabilities = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        return ((probabilities * mask) @ v).transpose(1, 2).flatten(0, 1)

    assert_near(ours, value_and_gradients(formula, qkv))


@pytest.mark.parametrize("short", [TOGETHER, ALONE])
@pytest.mark.parametrize("tile", [1, 30, 1 << 19])
def test_some_queries_get_the_same_context_as_among_all(tile: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, none and all of the queries of three sequences."""
    packing, rows = packing_of(6, 6, 3), torch.tensor([1, 5, 12, 13, 14])
    q, kv = random_tensor(15, 3, 8), random_tensor(15, 2, 3, 8, seed=2)
    together = value_and_gradients(
        lambda q, kv: grouped.grouped_attention(torch.cat([q.unsqueeze(1), kv], 1), packing, 0.0).index_select(0, rows),
        q,
        kv,
    )
    monkeypatch.setattr(runs, "TILE", tile)
    monkeypatch.setattr(runs, "SHORT", short)
    context, q_gradient, kv_gradient = value_and_gradients(
        lambda q, kv: grouped.attention_of_some(q, kv, packing.groups, [2, 0, 3], 0.0), q.index_select(0, rows), kv
    )
    assert_near((context, torch.zeros_like(q).index_copy(0, rows, q_gradient), kv_gradient), together)
    assert not kv_gradient[6:12].any()


@pytest.mark.parametrize("tile", [1, 30, 1 << 19])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_of_some_queries_pass_gradcheck(tile: int, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "TILE", tile)

    def compute(q: Tensor, kv: Tensor) -> Tensor:
        torch.manual_seed(5)
        return grouped.attention_of_some(q, kv, ((1, 4), (1, 3)), [3, 1], dropout)

    q, kv = random_tensor(4, 2, 3).double().requires_grad_(), random_tensor(7, 2, 2, 3, seed=2).double()
    assert torch.autograd.gradcheck(compute, (q, kv.requires_grad_()))


def test_some_queries_get_the_scaled_dropout_of_the_formula() -> None:
    q, kv = random_tensor(3, 2, 8), random_tensor(5, 2, 2, 8, seed=2)
    torch.manual_seed(5)
    context = grouped.attention_of_some(q, kv, ((1, 5),), [3], 0.4)
    torch.manual_seed(5)
    masks = MaskStream((draw_seed(), 0), 0.4)
    mask = masks.draw((2, 3, 5), torch.float32) / 0.6  # the rate is rounded to 1/65536
    k, v = kv.permute(1, 2, 0, 3)
    probabilities = (q.transpose(0, 1) @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    assert largest_difference(context, ((probabilities * mask) @ v).transpose(0, 1)) <= 1e-4


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_the_last_block_has_dropout_only_in_training(
    kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the attention of the last block has dropout."""
    monkeypatch.setattr(runs, "SHORT", ALONE)
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
    for short in (TOGETHER, ALONE):
        monkeypatch.setattr(runs, "SHORT", short)
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

    original = grouped.attention_of_some

    def spy(q: Tensor, *others: object) -> Tensor:
        asked.append(len(q))
        return original(q, *others)

    monkeypatch.setattr(grouped, "attention_of_some", spy)
    results = []
    for short in (TOGETHER, ALONE):
        monkeypatch.setattr(runs, "SHORT", short)
        model.zero_grad()
        loss = model(make_batch())
        loss.backward()
        results.append((loss, *[parameter.grad.clone() for parameter in model.parameters()]))
    num_masked, num_rows = int((make_batch()[5] != -1).sum()), 5
    assert asked == [num_masked + num_rows]
    assert_near(results[1], results[0], bound)


@pytest.mark.parametrize(
    ("lengths", "heads", "num_queries", "window", "expected"),
    [
        ((128, 100, 90), 2, 60, 0, True),
        ((128, 100, 90), 2, 60, 16, False),
        ((128, 100, 90), 2, 300, 0, False),
        ((64, 64, 64), 2, 60, 0, False),
        ((64, 64, 64), 12, 60, 0, True),
        ((300, 9, 9), 2, 300, 0, True),
    ],
)
def test_queries_are_skipped_where_sequences_have_many_scores(
    lengths: tuple[int, ...], heads: int, num_queries: int, window: int, expected: bool
) -> None:
    assert grouped.should_skip_queries(packing_of(*lengths), heads, num_queries, window) is expected


def test_a_batch_without_rows_has_no_loss_and_gradients_of_zero() -> None:
    model = BertForPreTrainingPreLN(tiny_config(attention_backend="grouped"))
    kind, *tensors = make_batch()
    loss = model((kind, *(tensor[:0] for tensor in tensors)))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_sequences_are_computed_together_unless_padding_costs_more_than_another_run() -> None:
    def sizes(*arguments: Any, **options: Any) -> list[tuple[int, int, int]]:
        return [(run.pairs, run.length, run.queries_each) for run in runs.make_runs(*arguments, **options)]

    lengths = packing_of(*[128] * 9, 127, 120, 97, 78, 9, 9).groups
    assert sizes(lengths, 2) == [(16, 128, 128), (8, 128, 128), (6, 78, 78)]  # at most TOGETHER scores
    some = packing_of(300, 40, 40, 40).groups
    assert sizes(some, 8, counts=[90, 1, 20, 3]) == [(8, 300, 90), (24, 40, 20)]
    assert sizes(packing_of(300, 300).groups, 2) == [(2, 300, 300), (2, 300, 300)]


@pytest.mark.parametrize(("length", "heads", "counts"), [(512, 12, [2] * 6), (400, 12, [3] * 4), (700, 3, [1] * 3)])
def test_the_heads_of_a_long_sequence_are_divided(length: int, heads: int, counts: list[int]) -> None:
    made = runs.make_runs(packing_of(length).groups, heads)
    assert [run.pairs for run in made] == counts
    assert [run.heads for run in made] == [slice(at * counts[0], (at + 1) * counts[0]) for at in range(len(counts))]
    assert all(len(list(run.tiles())) == 1 for run in made)


@pytest.mark.parametrize(("short", "tile"), [(TOGETHER, 1 << 19), (ALONE, 1 << 19), (ALONE, 300)])
def test_the_number_of_threads_does_not_change_a_bit(short: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several runs, with dropout: each has its own masks, whoever computes it."""
    monkeypatch.setattr(runs, "SHORT", short)
    monkeypatch.setattr(runs, "TOGETHER", 3 * 2 * 30**2)
    monkeypatch.setattr(runs, "TILE", tile)
    qkv, before = random_tensor(200, 3, 3, 8), torch.get_num_threads()

    def compute(threads: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(threads)
        torch.manual_seed(5)
        return value_and_gradients(lambda x: grouped.grouped_attention(x, packing_of(*[30] * 5, 28, 22), 0.4), qkv)

    try:
        alone, others = compute(1), [compute(threads) for threads in (2, 3)]
    finally:
        torch.set_num_threads(before)
    for result in others:
        assert all(torch.equal(*pair) for pair in zip(result, alone, strict=True))


def test_inference_mode_reaches_all_threads() -> None:
    qkv, before = random_tensor(1200, 3, 4, 8), torch.get_num_threads()
    expected = grouped.grouped_attention(qkv, packing_of(*[300] * 4), 0.0)
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = grouped.grouped_attention(qkv.clone(), packing_of(*[300] * 4), 0.0)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def test_an_error_in_a_run_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise MemoryError("no memory for the scores")

    monkeypatch.setattr(grouped, "_probabilities", fail)
    with pytest.raises(MemoryError, match="no memory for the scores"):
        grouped.grouped_attention(random_tensor(600, 3, 12, 8), packing_of(300, 300), 0.0)

"""The matmul limit counts what a training step must compute, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import matmul_limit
from benchmarks.batches import Batch, make_batch
from benchmarks.matmul_limit import step_products
from nvidia.config import BertConfig
from nvidia.cpu.libraries import Library
from nvidia.modelingpreln import BertForPreTrainingPreLN

CONFIG = BertConfig(
    vocab_size=2048,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=112,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    attention_backend="plain",
)


@pytest.mark.parametrize("fullness", [1.0, 0.7])
def test_products_are_those_of_a_step_but_for_what_nobody_reads(fullness: float) -> None:
    """torch's own count, row by row without padding: it has the last layer's unused queries beyond the limit."""
    batch = make_batch(6, 32, fullness, CONFIG.vocab_size, 5, seed=1)
    counted = sum(
        2 * count * rows * inner * columns * times
        for (count, rows, inner, columns), times in step_products(CONFIG, batch).items()
    )
    model, hidden, unread, pairs = BertForPreTrainingPreLN(CONFIG), CONFIG.hidden_size, 0, 0
    with FlopCounterMode(display=False) as counter:
        for row, length in enumerate(batch.input_mask.sum(1).tolist()):
            fields = (field[row : row + 1] for field in batch[1:])
            cut = Batch(2, *(field[:, :length] if field.dim() == 2 else field for field in fields))
            model(cut).backward()
            unused = length - 1 - int((cut.masked_lm_labels != -1).sum())
            unread += 3 * 2 * unused * hidden * hidden + 6 * 2 * unused * length * hidden
            pairs += 3 * 2 * hidden * 2  # the sentence head's product is too small to be in the limit
    assert counter.get_total_flops() == counted + unread + pairs


def test_every_product_is_timed_as_often_as_it_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def noted(shape: tuple[int, ...], library: str) -> Callable[[], None]:
        assert library == "onednn"
        return lambda: asked.append(shape)

    monkeypatch.setattr(matmul_limit, "_product", noted)
    monkeypatch.setattr(matmul_limit, "clock", lambda: float(len(asked)))
    products = {(1, 2, 3, 4): 5, (6, 7, 8, 9): 2}
    assert matmul_limit.seconds(products.items(), "onednn") == 7  # the first call of each is not counted
    assert len(asked) == 9


@pytest.mark.parametrize("library", matmul_limit.limits())
@pytest.mark.parametrize("shape", [(1, 5, 7, 3), (4, 5, 7, 3)])
def test_a_product_has_its_shape(shape: matmul_limit.Shape, library: Library) -> None:
    result = matmul_limit._product(shape, library)()
    assert result.shape == ((5, 3) if shape[0] == 1 else (4, 5, 3))


def test_no_product_is_listed_that_does_not_occur() -> None:
    config = BertConfig(vocab_size=2048, num_hidden_layers=1, hidden_size=48, num_attention_heads=3)
    products = step_products(config, make_batch(4, 16, 1.0, 2048, 3, seed=1))
    assert min(products.values()) > 0
    assert not torch.tensor(list(products)).eq(0).any()


def test_rows_have_the_lengths_of_real_shards() -> None:
    batch = make_batch(400, 128, None, CONFIG.vocab_size, 20, seed=0)
    lengths = batch.input_mask.sum(1)
    assert 0.83 < lengths.double().mean() / 128 < 0.87  # real shards: 0.85, with 121 lengths in 12,592 rows
    assert len(lengths.unique()) > 90
    assert 0.55 < (lengths == 128).double().mean() < 0.68

"""The matmul limit counts what a training step must compute, and nothing else."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.batches import Batch, make_batch
from benchmarks.matmul_limit import step_products
from nvidia.config import BertConfig
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


def test_no_product_is_listed_that_does_not_occur() -> None:
    config = BertConfig(vocab_size=2048, num_hidden_layers=1, hidden_size=48, num_attention_heads=3)
    products = step_products(config, make_batch(4, 16, 1.0, 2048, 3, seed=1))
    assert min(products.values()) > 0
    assert not torch.tensor(list(products)).eq(0).any()

"""The FLOP formula against torch's own count of the products in a real forward and backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.shards.schema import NO_LABEL
from data.stream.batches import Batch
from nvidia.attention import grouped
from nvidia.config import BertConfig
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.unit.training.planning.measuring import counted_attention
from training.metrics.flops import MatmulProbe, model_flops, visible_pairs

ROWS, WIDTH, MASKED = 5, 13, 3


def make_batch(config: BertConfig) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, config.vocab_size, (ROWS, WIDTH), generator=generator)
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, 2 : 2 + MASKED] = ids[:, 2 : 2 + MASKED]
    zeros = torch.zeros_like(ids)
    return Batch(torch.tensor(2), ids, torch.ones_like(ids), zeros, torch.ones(ROWS, dtype=torch.int64), labels)


@pytest.mark.parametrize("act", ["gelu", "geglu"])
def test_formula_is_what_torch_counts(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_MIN_SKIPPED", 0)  # so that the last block skips queries that nothing reads
    config = BertConfig(
        vocab_size=72,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=40,
        hidden_act=act,
        attention_backend="grouped",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, batch = BertForPreTrainingPreLN(config), make_batch(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products on other threads are not counted
    try:
        with FlopCounterMode(display=False) as counter, counted_attention() as attention:
            model(batch).backward()
    finally:
        torch.set_num_threads(threads)
    ours = model_flops(config, batch.input_mask.sum(1), ROWS * MASKED)
    # The backward pass computes the scores again, too.
    again = 2 * config.hidden_size * WIDTH * (2 * ROWS * WIDTH + ROWS * (1 + MASKED))
    assert ours == pytest.approx(counter.get_total_flops() + sum(attention) - again, rel=1e-6)


@pytest.mark.parametrize("window", [0, 2, 5, 8, 13, 40])
def test_pairs_that_a_window_shows_are_counted_one_by_one(window: int) -> None:
    lengths = (1, 4, 13)
    distances = [abs(query - key) for length in lengths for query in range(length) for key in range(length)]
    assert visible_pairs(torch.tensor(lengths), window) == sum(not window or each <= window // 2 for each in distances)


def test_padding_is_not_credited() -> None:
    config = BertConfig(vocab_size=64, hidden_size=8, num_attention_heads=2, intermediate_size=16)
    full = model_flops(config, torch.tensor([10, 10]), 4)
    assert model_flops(config, torch.tensor([10, 4]), 4) < full


def test_speed_is_work_over_the_best_time() -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, intermediate_size=48)
    moments = iter(range(1000))
    probe = MatmulProbe(config, 32, torch.float32, torch.device("cpu"), clock=lambda: float(next(moments)))
    assert probe.measure_speed() == 2.0 * 32 * 16 * (48 + 16) / 1.0  # by the clock, each measurement takes a second


def test_the_pace_is_the_median_of_the_same_work_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, intermediate_size=48)
    probe = MatmulProbe(config, 32, torch.float32, torch.device("cpu"))
    turns, done = iter([0.012, 0.011, 0.5, 0.013, 0.012]), []
    monkeypatch.setattr(probe, "seconds", lambda num_times: done.append(num_times) or next(turns))
    assert probe.measure_pace(slowest_speed=300 * probe.flops) == 0.012
    assert done == [3] * 5

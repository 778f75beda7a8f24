"""The order of samples as a pure function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.stream.order import SampleOrder, ShardSize

blocks = st.sampled_from([(1, 0), (7, 0), (32, 0), (256, 0), (252, 7), (256, 32)])  # rows of a block, of a unit
sizes = st.lists(
    st.builds(lambda rows, block: ShardSize(rows, *block), st.integers(1, 700), blocks), min_size=1, max_size=6
)
seeds = st.integers(0, 2**40)


def numbers(order: SampleOrder, shards: list[ShardSize], epoch: int, start: int, stop: int) -> np.ndarray:
    first = np.cumsum([0] + [size.num_rows for size in shards])
    located = locate(order, epoch, start, stop)
    assert (located[:, 1] < np.array([size.num_rows for size in shards])[located[:, 0]]).all()
    return first[located[:, 0]] + located[:, 1]


def locate(order: SampleOrder, epoch: int, start: int, stop: int) -> np.ndarray:
    """[stop - start, 2] (shard, row)"""
    windows = order.split_by_window(epoch, start, stop)
    found = [np.stack(order.locate(epoch, window, slice(start, stop)), axis=1) for window, start, stop in windows]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


@settings(max_examples=60)
@given(sizes, seeds, st.integers(0, 5))
def test_every_row_once_per_epoch(shards: list[ShardSize], seed: int, epoch: int) -> None:
    order = SampleOrder(shards, seed)
    found = numbers(order, shards, epoch, 0, order.num_rows)
    assert np.array_equal(np.sort(found), np.arange(sum(size.num_rows for size in shards)))


@settings(max_examples=60)
@given(sizes, seeds, st.integers(0, 5), st.data())
def test_a_jump_gives_the_same_rows_as_reading_from_the_start(
    shards: list[ShardSize], seed: int, epoch: int, data: st.DataObject
) -> None:
    order = SampleOrder(shards, seed)
    whole = numbers(order, shards, epoch, 0, order.num_rows)
    start = data.draw(st.integers(0, order.num_rows))
    stop = data.draw(st.integers(start, order.num_rows))
    assert np.array_equal(numbers(SampleOrder(shards, seed), shards, epoch, start, stop), whole[start:stop])


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(ShardSize, st.integers(100, 700), st.sampled_from([7, 32]), st.sampled_from([0, 7])),
        min_size=1,
        max_size=4,
    ),
    seeds,
)
def test_epochs_and_seeds_have_different_orders(shards: list[ShardSize], seed: int) -> None:
    order = SampleOrder(shards, seed)
    orders = [numbers(order, shards, epoch, 0, order.num_rows).tolist() for epoch in range(4)]
    orders.append(numbers(SampleOrder(shards, seed + 1), shards, 0, 0, order.num_rows).tolist())
    assert len({tuple(order) for order in orders}) == len(orders)


def test_neighbours_in_the_corpus_are_rarely_neighbours_in_a_batch() -> None:
    shards = [ShardSize(40_000, 256)] * 5
    order = SampleOrder(shards, 3)
    found = numbers(order, shards, 0, 0, order.num_rows)
    batches = found[: len(found) // 256 * 256].reshape(-1, 256)
    next_to = [(np.diff(np.sort(batch)) == 1).mean() for batch in batches]
    # A batch is drawn from a window of 32 blocks, so for one row in 32 the next row of the file is in the same batch.
    # Without shuffling it would be so for all rows.
    assert np.mean(next_to) < 1.2 / 32


def test_a_batch_of_new_shards_is_as_varied_as_a_random_draw() -> None:
    shards = [ShardSize(31_732, 256, 32)] * 3
    order = SampleOrder(shards, 42, row_length=64)
    found = numbers(order, shards, 0, 0, order.num_rows)

    def variety(rows: np.ndarray) -> tuple[float, float]:
        """Blocks per batch of 64, and neighbours at most 8 rows apart in 8 batches."""
        batches, spans = (np.sort(rows[: len(rows) // size * size].reshape(-1, size)) for size in (64, 512))
        blocks = np.mean([len(np.unique(batch)) for batch in batches // 256])
        return float(blocks), float((np.diff(spans) <= 8).mean())

    blocks, near = variety(found)
    random_blocks, random_near = variety(np.random.default_rng(0).permutation(order.num_rows))
    assert blocks >= random_blocks
    assert near <= 1.2 * random_near


def test_rows_move_over_the_whole_corpus() -> None:
    shards = [ShardSize(40_000, 256)] * 5
    order = SampleOrder(shards, 3)
    found = numbers(order, shards, 0, 0, order.num_rows)
    distance = np.abs(found - np.arange(len(found))) / len(found)
    # Two independent uniform positions are a third of the corpus apart on average.
    assert 0.30 < distance.mean() < 0.37


def test_the_order_does_not_change_between_versions() -> None:
    order = SampleOrder([ShardSize(10, 4), ShardSize(7, 4)], 42)
    assert locate(order, 1, 3, 8).tolist() == [[1, 1], [0, 6], [1, 3], [1, 6], [0, 2]]
    order = SampleOrder([ShardSize(10, 4, 2), ShardSize(7, 4, 2)], 42)
    assert locate(order, 1, 3, 8).tolist() == [[1, 0], [0, 8], [0, 7], [0, 3], [1, 3]]


@pytest.mark.parametrize("batch", [64, 256, 512, 768])
def test_a_batch_has_as_many_rows_of_each_unit(batch: int) -> None:
    order = SampleOrder([ShardSize(65_536, 256, 32)], 3)
    for window in range(4):
        units = order.window(0, window).units
        assert len(units) == 16_384
        for first in range(0, len(units) - batch + 1, batch):
            counts = np.bincount(units[first : first + batch], minlength=512)
            assert np.ptp(counts) <= 1
            ranks = counts.reshape(16, -1).sum(axis=1)  # 16 ranks with the same number of units each
            assert np.ptp(ranks) <= 1

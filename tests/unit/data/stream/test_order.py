"""The order of samples as a pure function."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.stream.order import Extent, Plan

extents = st.lists(st.builds(Extent, st.integers(1, 700), st.sampled_from([1, 7, 32, 256])), min_size=1, max_size=6)
seeds = st.integers(0, 2**40)


def numbers(plan: Plan, shards: list[Extent], epoch: int, start: int, stop: int) -> np.ndarray:
    first = np.cumsum([0] + [extent.num_rows for extent in shards])
    located = plan.locate(epoch, start, stop)
    assert (located[:, 1] < np.array([extent.num_rows for extent in shards])[located[:, 0]]).all()
    return first[located[:, 0]] + located[:, 1]


@settings(max_examples=60)
@given(extents, seeds, st.integers(0, 5))
def test_every_row_once_an_epoch(shards: list[Extent], seed: int, epoch: int) -> None:
    plan = Plan(shards, seed)
    found = numbers(plan, shards, epoch, 0, plan.num_rows)
    assert np.array_equal(np.sort(found), np.arange(sum(extent.num_rows for extent in shards)))


@settings(max_examples=60)
@given(extents, seeds, st.integers(0, 5), st.data())
def test_a_jump_gives_what_reading_up_to_it_gives(
    shards: list[Extent], seed: int, epoch: int, data: st.DataObject
) -> None:
    plan = Plan(shards, seed)
    whole = numbers(plan, shards, epoch, 0, plan.num_rows)
    start = data.draw(st.integers(0, plan.num_rows))
    stop = data.draw(st.integers(start, plan.num_rows))
    assert np.array_equal(numbers(Plan(shards, seed), shards, epoch, start, stop), whole[start:stop])


@settings(max_examples=40)
@given(st.lists(st.builds(Extent, st.integers(100, 700), st.sampled_from([7, 32])), min_size=1, max_size=4), seeds)
def test_no_two_epochs_and_no_two_seeds_in_the_same_order(shards: list[Extent], seed: int) -> None:
    plan = Plan(shards, seed)
    orders = [numbers(plan, shards, epoch, 0, plan.num_rows).tolist() for epoch in range(4)]
    orders.append(numbers(Plan(shards, seed + 1), shards, 0, 0, plan.num_rows).tolist())
    assert len({tuple(order) for order in orders}) == len(orders)


def test_neighbours_in_the_corpus_are_rarely_neighbours_in_a_batch() -> None:
    shards = [Extent(40_000, 256)] * 5
    plan = Plan(shards, 3)
    order = numbers(plan, shards, 0, 0, plan.num_rows)
    batches = order[: len(order) // 256 * 256].reshape(-1, 256)
    next_to = [(np.diff(np.sort(batch)) == 1).mean() for batch in batches]
    # A batch is drawn from a window of 32 blocks: one row in 32 has the row that follows it in the file beside it in
    # the batch. Reading in order would make it all of them.
    assert np.mean(next_to) < 1.2 / 32


def test_rows_travel_over_the_whole_corpus() -> None:
    shards = [Extent(40_000, 256)] * 5
    plan = Plan(shards, 3)
    order = numbers(plan, shards, 0, 0, plan.num_rows)
    distance = np.abs(order - np.arange(len(order))) / len(order)
    # Two independent uniform places are a third of the corpus apart on average.
    assert 0.30 < distance.mean() < 0.37


def test_the_plan_does_not_change_between_versions() -> None:
    plan = Plan([Extent(10, 4), Extent(7, 4)], 42)
    assert plan.locate(1, 3, 8).tolist() == [[1, 1], [0, 6], [1, 3], [1, 6], [0, 2]]

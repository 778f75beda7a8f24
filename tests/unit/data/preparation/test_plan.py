"""Which piece donates to which, and which rows make up which shard."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from data.preparation.plan import choose_donors, plan_shards


@settings(max_examples=100)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 25))
def test_shards_divide_the_rows_evenly(sizes: list[int], shard_rows: int) -> None:
    parts = [(f"piece{number}", "donor", number % 3, size) for number, size in enumerate(sizes)]
    tasks = plan_shards("training", 32, 5, parts, shard_rows)
    rows = [
        (part.piece, row, part.first_number + row - part.start)
        for task in tasks
        for part in task.ranges
        for row in range(part.start, part.stop)
    ]
    named = [(piece, row) for piece, _, _, size in parts for row in range(size)]
    assert rows == [(*row, number) for number, row in enumerate(named)]
    held = [sum(part.stop - part.start for part in task.ranges) for task in tasks]
    assert len(tasks) == -(-sum(sizes) // shard_rows)
    assert not held or (max(held) <= shard_rows and max(held) - min(held) <= 1)


def test_planning_many_shards_takes_linear_time() -> None:
    parts = [(f"{number}", "donor", 0, 8000) for number in range(50_000)]
    started = time.process_time()
    assert len(plan_shards("training", 128, 20, parts, 32768)) == 12208
    assert time.process_time() - started < 10, "quadratic time would be minutes"


def test_donors_are_of_another_document_if_there_is_one() -> None:
    """The pieces of one document follow each other; None stands for a piece with several documents."""
    for keys in ([None, 5, 5, 5, None, 8, 8], [5, 5, 8, 8, 8], [5, 5, None], [None, None, 5]):
        for shift in range(1, len(keys)):
            for piece, donor in enumerate(choose_donors(keys, shift)):
                assert donor != piece
                assert keys[donor] is None or keys[donor] != keys[piece]
    assert choose_donors([None] * 4, 3) == [3, 0, 1, 2]
    assert choose_donors([5], 0) == [0]
    assert len(choose_donors([5] * 20_000, 7)) == 20_000, "a single document of any size takes no time"

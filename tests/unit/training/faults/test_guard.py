"""Where the next step begins when samples are left out."""

import pytest

from training.faults.skips import next_unskipped


@pytest.mark.parametrize(
    ("sample", "rows", "expected"),
    [
        (0, 8, 0),
        (8, 8, 16),  # it is the batch left out
        (16, 8, 16),
        (32, 8, 48),  # two ranges, one behind the other
        (0, 16, 16),  # the batch has doubled: the range lies in its second half
        (4, 8, 16),  # another start: it begins before the range and ends in it
        (12, 8, 16),  # it begins in the range
        (24, 16, 48),
        (48, 64, 48),
    ],
)
def test_no_step_touches_a_range(sample: int, rows: int, expected: int) -> None:
    skips = ((40, 48), (8, 16), (32, 40))
    found = next_unskipped(sample, skips, rows)
    assert found == expected
    assert all(found >= end or found + rows <= first for first, end in skips)

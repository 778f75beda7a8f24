"""Faults that a test puts into a rank: what happens is real, and where it happens is patched in from outside.

A fault is a dictionary: its `kind`, the `rank` it is for (left out: all), and what its kind needs. `kill` needs a
`stage` of a save and the `step` of that save; SIGKILL comes right before that stage begins.
"""

from tests.faults import saving, starting, steps, stops, surroundings
from tests.faults.patching import Fault

KINDS = saving.KINDS | starting.KINDS | steps.KINDS | stops.KINDS | surroundings.KINDS


def put_in(fault: Fault, rank: int) -> None:
    if fault.get("rank", rank) == rank:
        KINDS[fault["kind"]](fault)

"""Faults that a test injects into a rank: the fault is real, and the place where it happens is patched.

A fault is a dictionary: its `kind`, its `rank` (default: all), and the parameters of its kind. `kill` needs a `stage`
of a save and the `step` of that save; SIGKILL comes right before that stage begins.
"""

from tests.faults import saving, starting, steps, stops, surroundings
from tests.faults.patching import Fault

KINDS = saving.KINDS | starting.KINDS | steps.KINDS | stops.KINDS | surroundings.KINDS


def put_in(fault: Fault, rank: int) -> None:
    if fault.get("rank", rank) == rank:
        KINDS[fault["kind"]](fault)

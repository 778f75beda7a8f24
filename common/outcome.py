"""How a run ended, in files for who started it: a launcher's exit code is 0 when it was killed itself."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

# Names the file of rank 0's exit code. Whoever sets it looks there afterwards; without it nothing is written. The
# `deepspeed` command hands on to other machines what begins with PYTHON.
OUTCOME_VARIABLE = "PYTHON_BERT_PRETRAINING_OUTCOME"


def leave_outcome(code: int, is_main: bool) -> None:
    """Rank 0's exit code, where somebody asked for it."""
    name = os.environ.get(OUTCOME_VARIABLE)
    if name and is_main:
        with suppress(OSError):
            Path(name).write_text(f"{code}\n")


def read_outcome(path: Path) -> int | None:
    """The code that was left, or None: rank 0 did not come to its end."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def sign_of_life(rank: int) -> Generator[None]:
    """A file beside the outcome as long as this rank lives; one that was killed leaves it behind."""
    name = os.environ.get(OUTCOME_VARIABLE)
    if not name:
        yield
        return
    sign = Path(f"{name}.rank_{rank}")
    with suppress(OSError):
        sign.touch()
        if rank == 0:
            Path(name).unlink(missing_ok=True)  # of a command before this one in the same script
    try:
        yield
    finally:
        with suppress(OSError):
            sign.unlink(missing_ok=True)


def find_lost_rank(path: Path) -> int | None:
    """The rank that left its sign behind, if it is one alone."""
    found = [re.search(r"\.rank_(\d+)$", sign.name) for sign in path.parent.glob(f"{path.name}.rank_*")]
    ranks = [int(match[1]) for match in found if match]
    return ranks[0] if len(ranks) == 1 else None

"""--time_budget: a run whose length is given by the clock, over all its restarts."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.errors import UserError, shortened
from common.files import write_plainly

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Kept back for the last validation, checkpoint and export, until their real cost has been seen.
RESERVED_SHARE = 0.03
MAX_RESERVED_SECONDS = 600.0
MAX_SECONDS = 10 * 365 * 86400.0
SAFETY = 1.5  # times the longest pause seen
TIME_SPENT = "time_spent.json"  # beside the checkpoints


@dataclass(frozen=True)
class Duration:
    """A length of time, and the text that the user wrote."""

    seconds: float
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """`90s`, `45m`, `24h` or `1d12h`."""
        if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
            raise UserError(f"found {shortened(text)}, expected a length of time such as 90s, 45m, 24h or 1d12h")
        seconds = sum(float(number) * UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smhd])", text))
        if not 0 < seconds <= MAX_SECONDS:
            raise UserError(
                f"found {shortened(text)}, which is {seconds:g} seconds, expected more than zero and at most 10 years, "
                f"such as 90s, 45m, 24h or 1d12h"
            )
        return cls(seconds, text)


def process_start(clock: Callable[[], float] = time.monotonic) -> float:
    """When this process began, by `clock`. Its imports took seconds, which the user's time budget has to pay for."""
    return clock() - (time.time() - psutil.Process().create_time())


def note_time_spent(folder: Path, seconds: float) -> None:
    """For a process that is killed and cannot save the time since its last checkpoint."""
    write_plainly(folder / TIME_SPENT, json.dumps({"seconds": seconds}) + "\n")


def read_time_spent(folder: Path) -> float:
    """What note_time_spent() last noted; 0 where there is none that can be read: then the checkpoint's time counts."""
    try:
        seconds = float(json.loads((folder / TIME_SPENT).read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return seconds if 0 <= seconds <= MAX_SECONDS else 0.0


@dataclass
class Budget:
    """Seconds of a run: `used_before` by earlier processes of it, the rest by this one. Time between is not counted."""

    total: float | None
    used_before: float = 0.0
    clock: Callable[[], float] = time.monotonic
    began: float | None = None  # when this process did, by `clock`; None: now
    longest_pause: float = 0.0
    num_last_pauses: int = 2  # validation, checkpoint, and an export where one is asked for
    is_ended: bool = False

    def __post_init__(self) -> None:
        if self.began is None:
            self.began = self.clock()

    def used(self) -> float:
        """Seconds used. A budget that has ended counts as used up, so that a restart does not begin again."""
        assert self.began is not None
        used = self.used_before + self.clock() - self.began
        return max(used, self.total or 0.0) if self.is_ended else used

    @property
    def reserved(self) -> float:
        """What the schedule leaves at the end. Fixed from the start, so that the rate does not jump."""
        assert self.total is not None
        return min(MAX_RESERVED_SECONDS, RESERVED_SHARE * self.total)

    def left(self) -> float:
        """Seconds to train in from now on: without what the end needs."""
        assert self.total is not None
        return max(0.0, self.total - self.needed() - self.used())

    def needed(self) -> float:
        """What the end needs: what is kept back, or what validation and checkpoints have been seen to take."""
        return max(self.reserved, SAFETY * self.num_last_pauses * self.longest_pause)

    def progress(self, used: float) -> float:
        """The share of the training time that is over, from 0 to 1."""
        assert self.total is not None
        return min(1.0, used / (self.total - self.reserved))

    def note_pause(self, seconds: float) -> None:
        """A validation or a checkpoint took this long; the last ones will too, and an export no longer."""
        self.longest_pause = max(self.longest_pause, seconds)

    def is_over(self, used: float, seconds_per_step: float) -> bool:
        """Whether one more step would use time that the end needs."""
        if self.total is None:
            return False
        return self.is_ended or used + seconds_per_step + self.needed() >= self.total

    def end(self) -> None:
        """Count the whole budget as used from now on."""
        self.is_ended = True

"""--time_budget: a run that ends after a given time, restarts included."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from common.errors import UserError, shortened

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Reserved for the last validation, checkpoint and export until their cost has been measured.
RESERVED_SHARE = 0.03
MAX_RESERVED_SECONDS = 600.0
MAX_SECONDS = 10 * 365 * 86400.0
SAFETY = 1.5  # times the longest pause seen


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
    """The time by `clock` at which this process started; the time budget includes its imports."""
    return clock() - (time.time() - psutil.Process().create_time())


@dataclass
class Budget:
    """The seconds that a run has used: `used_before` in earlier processes, the rest in this one."""

    total: float | None
    used_before: float = 0.0
    clock: Callable[[], float] = time.monotonic
    began: float | None = None  # start of this process by `clock`; None: now
    longest_pause: float = 0.0
    num_last_pauses: int = 2  # validation, checkpoint, and probe and export if there are any
    is_ended: bool = False

    def __post_init__(self) -> None:
        if self.began is None:
            self.began = self.clock()

    def used(self) -> float:
        """Seconds used. A budget that has ended counts as used up, so a restart does not train further."""
        assert self.began is not None
        used = self.used_before + self.clock() - self.began
        return max(used, self.total or 0.0) if self.is_ended else used

    @property
    def reserved(self) -> float:
        """Seconds at the end that the schedule does not use; constant, so the learning rate does not jump."""
        assert self.total is not None
        return min(MAX_RESERVED_SECONDS, RESERVED_SHARE * self.total)

    def left(self) -> float:
        """Seconds left for training, without those needed at the end."""
        assert self.total is not None
        return max(0.0, self.total - self.needed() - self.used())

    def needed(self) -> float:
        """Seconds needed at the end: those reserved, or more if validation and checkpoints have taken longer."""
        return max(self.reserved, SAFETY * self.num_last_pauses * self.longest_pause)

    def progress(self, used: float) -> float:
        """The share of the training time that `used` seconds are, from 0 to 1."""
        assert self.total is not None
        return min(1.0, used / (self.total - self.reserved))

    def note_pause(self, seconds: float) -> None:
        """Record how long a validation or checkpoint took; the last ones and the export should take no longer."""
        self.longest_pause = max(self.longest_pause, seconds)

    def is_over(self, used: float, seconds_per_step: float) -> bool:
        """Whether one more step would use time that the end needs."""
        if self.total is None:
            return False
        return self.is_ended or used + seconds_per_step + self.needed() >= self.total

    def end(self) -> None:
        """Count the whole budget as used from now on."""
        self.is_ended = True

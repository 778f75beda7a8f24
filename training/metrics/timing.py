"""Where the time of a run goes: seconds by phase since the last report."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

# In the order in which they are shown. What lies between them is "other".
SECTIONS = ("data_wait", "forward", "backward", "optimizer", "logging", "checkpoint", "validation")
# Not part of training: throughput and seconds a step leave them out.
PAUSES = ("checkpoint", "validation")


class SectionTimer:
    """Seconds spent in each phase. Adding one never waits for the device; reading them does, once.

    On a GPU work is only queued when a call returns, so the compute phases are measured by events in the queue.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.uses_events = device.type == "cuda"
        self.clock = clock
        self.began = clock()
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.on_begin: Callable[[str], None] | None = None

    def begin(self, phase: str) -> None:
        """Tell who listens that there is progress."""
        if self.on_begin is not None:
            self.on_begin(phase)

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        self.begin(phase)
        if self.uses_events and phase in ("forward", "backward", "optimizer"):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self.events.append((phase, start, end))
        else:
            began = self.clock()
            yield
            self.seconds[phase] += self.clock() - began

    def training_so_far(self) -> float:
        """Seconds of training since the last lap, by the clock of this process."""
        return self.clock() - self.began - sum(self.seconds[pause] for pause in PAUSES)

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, with "total" (the wall clock) and "other"; begins anew."""
        if self.events:
            torch.cuda.synchronize()
            for phase, start, end in self.events:
                self.seconds[phase] += start.elapsed_time(end) / 1000
        now = self.clock()
        seconds, total = self.seconds, now - self.began
        self.began, self.seconds, self.events = now, dict.fromkeys(SECTIONS, 0.0), []
        return {**seconds, "other": max(0.0, total - sum(seconds.values())), "total": total}


def training_seconds(seconds: dict[str, float]) -> float:
    """The part of a lap that was training: all but validation and checkpoints."""
    return max(seconds["total"] - sum(seconds[pause] for pause in PAUSES), 1e-9)

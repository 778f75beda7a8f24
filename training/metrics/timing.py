"""Where the time of a run goes: seconds by timer section since the last report."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

# In the order in which they are shown. Time outside of them is "other".
SECTIONS = ("data_wait", "forward", "backward", "optimizer", "logging", "checkpoint", "validation", "probe")
# Not part of training: throughput and seconds per step exclude them.
PAUSES = ("checkpoint", "validation", "probe")


class SectionTimer:
    """Seconds spent in each section. Measuring never waits for the device; `lap` does, once.

    On a GPU a call returns when its work is queued, so compute sections are measured by events in the queue.
    `on_begin` is called with the name of each section that begins.
    """

    def __init__(
        self,
        device: torch.device,
        on_begin: Callable[[str], None] = lambda section: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.uses_events = device.type == "cuda"
        self.clock = clock
        self.began = clock()
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.begin = on_begin

    @contextmanager
    def measure(self, section: str) -> Generator[None]:
        self.begin(section)
        if self.uses_events and section in ("forward", "backward", "optimizer"):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self.events.append((section, start, end))
        else:
            began = self.clock()
            yield
            self.seconds[section] += self.clock() - began

    def training_so_far(self) -> float:
        """Seconds of training since the last lap, by the clock of this process."""
        return self.clock() - self.began - sum(self.seconds[pause] for pause in PAUSES)

    def lap(self) -> dict[str, float]:
        """Seconds by section since the last lap, and "other", "total" (wall clock) and "training"; starts a new lap."""
        if self.events:
            torch.cuda.synchronize()
            for section, start, end in self.events:
                self.seconds[section] += start.elapsed_time(end) / 1000
        now = self.clock()
        seconds, total = self.seconds, now - self.began
        training = max(total - sum(seconds[pause] for pause in PAUSES), 1e-9)
        self.began, self.seconds, self.events = now, dict.fromkeys(SECTIONS, 0.0), []
        return {**seconds, "other": max(0.0, total - sum(seconds.values())), "total": total, "training": training}

"""Reading the batches of each step, where a rank's data may become unreadable: then all ranks raise Unreadable."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data.shards.dataset import PretrainingDataset
from data.stream.loader import StepBatches, TrainingStream
from training.checkpoints.state import Progress
from training.engine.build import set_batch
from training.metrics.timing import SectionTimer
from training.plan.step_plan import Segment, StepPlan
from training.runtime import collectives


@dataclass
class StepReader:
    """Reads steps from the run's cursor on, in the size that the plan gives there, and prefetches the next ones.

    Opens another stream where the plan changes, and where the cursor was moved between two steps. Call `close` at the
    end.
    """

    open_stream: Callable[[Segment], TrainingStream]
    plan: StepPlan
    progress: Progress
    engine: Any
    timer: SectionTimer

    def __post_init__(self) -> None:
        self._stream: TrainingStream | None = None
        self._steps: Iterator[StepBatches] | None = None
        self._segment: Segment | None = None
        self._next_sample = -1  # where the open stream continues
        self._is_prefetched = False  # on every rank, as of the last exchange

    @property
    def dataset(self) -> PretrainingDataset:
        """The dataset of the last step."""
        assert self._stream is not None
        return self._stream.dataset

    @property
    def failure(self) -> BaseException | None:
        """Why the prefetch has failed on this rank: known before the step is asked for."""
        return None if self._stream is None else self._stream.failure

    @property
    def has_next(self) -> bool:
        """Whether the next step is in memory on this rank."""
        return self._stream is not None and self._stream.has_next

    def note_prefetched(self, on_all_ranks: bool) -> None:
        """Whether every rank has its next step in memory: then reading it needs no exchange."""
        self._is_prefetched = on_all_ranks

    def all_ranks_next(self) -> StepBatches:
        """The next step's batches; Unreadable on all ranks where one cannot read them."""
        segment = self.plan.at(self.progress.samples)
        is_new = segment is not self._segment or self.progress.samples != self._next_sample
        batches, failure = collectives.attempt(lambda: self._read(segment if is_new else None))
        # A stream that was opened just now, which happens on all ranks at the same step, has prefetched nothing.
        is_certain = self._is_prefetched and not is_new
        if not is_certain and collectives.all_ranks_any(failure is not None)[0]:
            raise collectives.Unreadable(failure)
        assert batches is not None, failure
        self._next_sample = batches.next_sample
        return batches

    def _read(self, new: Segment | None) -> StepBatches:
        """The next step; `new`: of another stream, which is opened first."""
        if new is not None:
            self.close()
            self._segment, self._stream = new, self.open_stream(new)
            set_batch(self.engine, new)
            self._steps = self._stream.steps(self.progress.samples)
        assert self._steps is not None
        with self.timer.measure("data_wait"):
            return next(self._steps)

    def close(self) -> None:
        """End the prefetching thread."""
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
            self._steps = None

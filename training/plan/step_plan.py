"""Values over tokens seen, and the rows of each step over the rows seen: how many, how long, from which data.

A run's cursor counts rows. The plan divides it into segments of equal steps, at row numbers that depend only on the
flags and the data, so a resumed run, or a run on another number of ranks, takes the same rows at every step.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TypeVar

from common.errors import UserError

T = TypeVar("T")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
POINT = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class TokenSchedule:
    """Points in rising order of tokens; the first is at 0. `text` is what the user wrote."""

    points: tuple[tuple[int, float], ...]
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "TokenSchedule":
        """One value for the whole run, or comma-separated `tokens:value` points."""
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return cls(((0, float(text)),), text)
        points = []
        for part in text.split(","):
            match = POINT.fullmatch(part.strip())
            if match is None:
                raise UserError(
                    f"found {part!r}, expected a single value, or comma-separated points tokens:value, such as "
                    f"0:0.30,100M:0.15 (units: k, M, G, T)"
                )
            number, unit, value = match.groups()
            points.append((round(float(number) * UNITS[unit]), float(value)))
        tokens = [position for position, _ in points]
        if tokens != sorted(set(tokens)) or tokens[0] != 0:
            raise UserError(f"found points at {tokens} tokens, expected numbers that start at 0 and rise")
        return cls(tuple(points), text)

    def in_steps(self, tokens_per_step: float, tokens_before: float = 0.0) -> tuple[tuple[int, float], ...]:
        """The same points with steps in place of tokens; of two points at the same step, the later one counts.

        Steps are counted from `tokens_before`, so points before the first step have negative numbers.
        """
        return tuple(
            {round((tokens - tokens_before) / tokens_per_step): value for tokens, value in self.points}.items()
        )


@dataclass(frozen=True)
class Phase:
    """The part of a run that reads rows of one length. It starts with the first row of its data's first epoch."""

    index: int  # of its dataset
    length: int  # tokens per row, padding included
    micro: int  # rows per micro-step and rank
    num_rows: int  # in its dataset
    tokens_per_row: float  # without padding; a mean
    first_sample: int = 0
    first_epoch: int = 0
    tokens_before: float = 0.0  # without padding, in earlier phases; estimated from their means

    def epoch_of(self, samples: int) -> int:
        return self.first_epoch + (samples - self.first_sample) // self.num_rows

    def epoch_end(self, samples: int) -> int:
        """The sample at which the epoch of `samples` ends, if the phase lasts that long."""
        return self.first_sample + (self.epoch_of(samples) + 1 - self.first_epoch) * self.num_rows

    def after(self, before: "Phase | None", samples: int) -> "Phase":
        """This phase, started after `samples` rows. An unfinished epoch of the phase `before` counts as one."""
        if before is None:
            return self
        return replace(
            self,
            first_sample=samples,
            first_epoch=before.first_epoch + ceil((samples - before.first_sample) / before.num_rows),
            tokens_before=before.tokens_at(samples),
        )

    def tokens_at(self, samples: int) -> float:
        return self.tokens_before + (samples - self.first_sample) * self.tokens_per_row


@dataclass(frozen=True)
class Segment:
    """Steps of one size, starting at `first_sample`."""

    first_sample: int
    phase: Phase
    accumulation: int  # micro-steps per step
    rows: int  # per step, on all ranks together


@dataclass(frozen=True)
class StepPlan:
    """Segments in order. The first starts at 0, each ends where the next one starts, the last one has no end."""

    segments: tuple[Segment, ...]

    def at(self, samples: int) -> Segment:
        """The segment of the step that starts after `samples` rows."""
        return self.segments[bisect_right([segment.first_sample for segment in self.segments], samples) - 1]

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple({segment.phase.index: segment.phase for segment in self.segments}.values())

    def steps_for(self, samples: int) -> int:
        """Steps from the start until `samples` rows have been seen."""
        ends = [segment.first_sample for segment in self.segments[1:]] + [samples]
        return sum(
            max(0, -(-(min(end, samples) - segment.first_sample) // segment.rows))
            for segment, end in zip(self.segments, ends, strict=True)
        )

    def next_steps(self, samples: int, steps: int) -> Iterator[tuple[Segment, int]]:
        """The segments of the `steps` steps after `samples` rows, with the number of steps in each."""
        for segment in self.segments[1:]:
            here = self.at(samples)
            count = min(steps, max(0, -(-(segment.first_sample - samples) // here.rows)))
            yield here, count
            samples, steps = samples + count * here.rows, steps - count
        yield self.at(samples), steps

    def sample_after(self, samples: int, steps: int) -> int:
        """The cursor `steps` steps after `samples`."""
        return samples + sum(count * segment.rows for segment, count in self.next_steps(samples, steps))

    def micro_steps_in(self, samples: int, steps: int) -> int:
        """Micro-steps in the `steps` steps after `samples` rows; their time is proportional to it."""
        return sum(count * segment.accumulation for segment, count in self.next_steps(samples, steps))

    def passes(self, samples: int) -> float:
        """Epochs in `samples` rows, summed over the phases."""
        ends = [phase.first_sample for phase in self.phases[1:]] + [samples]
        return sum(
            max(0, min(end, samples) - phase.first_sample) / phase.num_rows
            for phase, end in zip(self.phases, ends, strict=True)
        )


def plan_steps(
    phases: Sequence[tuple[int, Phase]], batches: TokenSchedule | None, *, accumulation: int, world_size: int
) -> StepPlan:
    """The plan of `phases`, given with the tokens at which each starts.

    `batches` are --batch_schedule's rows per step; without them, steps have `accumulation` micro-steps. A change takes
    effect at the first step that starts at or after its tokens, which are counted as rows times mean tokens. Rows per
    step refer to the last phase's length; steps of shorter rows have proportionally more rows.
    """
    micro_rows = phases[-1][1].micro * world_size
    sizes = [(0, accumulation)]
    if batches is not None:
        sizes = [(tokens, int(rows) // micro_rows) for tokens, rows in batches.points]
    changes = sorted({tokens for tokens, _ in [*phases, *sizes]})
    segments: list[Segment] = []
    phase: Phase | None = None
    sample = 0
    for start, end in zip(changes, [*changes[1:], None], strict=True):
        template = _in_force(phases, start)
        current = phase if phase is not None and phase.index == template.index else template.after(phase, sample)
        micro_steps = _in_force(sizes, start)
        rows = current.micro * world_size * micro_steps
        if end is not None and current.tokens_at(sample) >= end:
            continue  # the next change falls into the same step and replaces this one
        segments.append(Segment(sample, current, micro_steps, rows))
        phase = current
        if end is not None:
            sample += rows * ceil((end - current.tokens_at(sample)) / (rows * current.tokens_per_row))
    return StepPlan(tuple(segments))


def _in_force(points: Sequence[tuple[int, T]], tokens: int) -> T:
    """The value of the last point at or before `tokens`."""
    return points[bisect_right([start for start, _ in points], tokens) - 1][1]


def check_batches(schedule: TokenSchedule | None, micro_rows: int) -> None:
    """Check that every value is a whole number of micro-steps on every rank."""
    for _, rows in () if schedule is None else schedule.points:
        if rows < 1 or rows % micro_rows:
            raise UserError(
                f"--batch_schedule: found {rows:g} rows per step, expected multiples of {micro_rows}, the rows of a "
                f"micro-step on all ranks; use these, or change train_micro_batch_size_per_gpu"
            )

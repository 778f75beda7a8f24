"""How many rows a step takes, as a function of the rows seen: constant, or a schedule over tokens."""

from bisect import bisect_right
from dataclasses import dataclass

from common.errors import UserError
from training.token_schedule import TokenSchedule


@dataclass(frozen=True)
class BatchPlan:
    """`micro_rows` rows a micro-step over all ranks; `points` of (rows seen, micro-steps a step), the first at 0."""

    micro_rows: int
    points: tuple[tuple[int, int], ...]

    def accumulation_at(self, samples: int) -> int:
        """Micro-steps of the step that begins after `samples` rows."""
        return self.points[bisect_right([start for start, _ in self.points], samples) - 1][1]

    def rows_at(self, samples: int) -> int:
        return self.micro_rows * self.accumulation_at(samples)

    def steps_for(self, num_rows: int) -> int:
        """Steps until `num_rows` rows have been seen, from the first on."""
        steps = seen = 0
        ends = [start for start, _ in self.points[1:]] + [num_rows]
        for (_, accumulation), end in zip(self.points, ends, strict=True):
            count = max(0, -(-(min(end, num_rows) - seen) // (self.micro_rows * accumulation)))
            steps, seen = steps + count, seen + count * self.micro_rows * accumulation
        return steps


def plan_batches(
    schedule: TokenSchedule | None, micro_rows: int, accumulation: int, tokens_per_row: float
) -> BatchPlan:
    """The plan of --batch_schedule, whose values are rows a step; without one, of the DeepSpeed JSON's numbers."""
    if schedule is None:
        return BatchPlan(micro_rows, ((0, accumulation),))
    points = {round(tokens / tokens_per_row): int(rows) // micro_rows for tokens, rows in schedule.points}
    return BatchPlan(micro_rows, tuple(points.items()))


def check_batches(schedule: TokenSchedule, micro_rows: int) -> None:
    """Every value must be a whole number of micro-steps on every rank."""
    for _, rows in schedule.points:
        if rows < 1 or rows % micro_rows:
            raise UserError(
                f"--batch_schedule: {rows:g} rows a step are no multiple of {micro_rows}, a micro-step over "
                f"all ranks; choose multiples, or another train_micro_batch_size_per_gpu"
            )

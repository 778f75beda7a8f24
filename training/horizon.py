"""Where a run ends and where its epochs do: arithmetic on steps and rows, without any state."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """Ends at whichever comes first: `num_epochs` passes, `total_steps` of the schedule, or `max_steps` of the run."""

    num_rows: int
    batch_size: int
    num_epochs: int
    total_steps: int
    schedule_origin: int
    start_step: int
    max_steps: int | None = None
    max_steps_per_epoch: int | None = None
    steps_of_all_epochs: int | None = None  # where the batch size changes on the way

    def epoch_of(self, samples: int) -> int:
        return samples // self.num_rows

    def is_finished(self, step: int, samples: int) -> bool:
        return (
            self.epoch_of(samples) >= self.num_epochs
            or step >= self.schedule_origin + self.total_steps
            or (self.max_steps is not None and step >= self.start_step + self.max_steps)
        )

    def last_step(self) -> int:
        """The step at which the run ends, when nothing is skipped."""
        whole_epochs = -(-self.num_epochs * self.num_rows // self.batch_size)
        if self.steps_of_all_epochs is not None:
            whole_epochs = self.steps_of_all_epochs
        if self.max_steps_per_epoch is not None:
            whole_epochs = min(whole_epochs, self.num_epochs * self.max_steps_per_epoch)
        ends = [self.schedule_origin + self.total_steps, self.start_step + whole_epochs]
        if self.max_steps is not None:
            ends.append(self.start_step + self.max_steps)
        return min(ends)

    def next_sample(self, samples: int) -> int:
        """Where reading goes on after `samples` rows: there, or at the next epoch when this one has had its steps."""
        if self.max_steps_per_epoch is None:
            return samples
        epoch = self.epoch_of(samples)
        steps_in_epoch = (samples - epoch * self.num_rows) // self.batch_size
        return (epoch + 1) * self.num_rows if steps_in_epoch >= self.max_steps_per_epoch else samples

"""Load on the shared file system: reading data, and writing checkpoints."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from training.planning.estimate import Estimate
from training.planning.memory import estimate_states
from training.planning.workload import ParameterCount

MAX_BYTES_PER_WRITER = 1e9  # per second: one process that serializes and writes a checkpoint file


@dataclass(frozen=True)
class StorageLoad:
    """Bytes and seconds. Ranks together read each block of the data about once."""

    read_bytes_per_second: float
    is_row_size_measured: bool
    checkpoint_bytes: float
    largest_rank_bytes: float
    save_seconds: float
    interval_seconds: float
    kept_bytes: float | None  # None: every checkpoint is kept

    @property
    def saving_share(self) -> float:
        """The share of the time that training waits for checkpoints."""
        return self.save_seconds / (self.interval_seconds + self.save_seconds)

    @property
    def write_bytes_per_second(self) -> float:
        return self.checkpoint_bytes / self.interval_seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "saving_share": self.saving_share,
            "write_bytes_per_second": self.write_bytes_per_second,
        }


def row_bytes(width: int, masked: float) -> float:
    """An uncompressed row of a shard: ids, mask, segments, positions and ids of predictions, label."""
    return width * (4 + 1 + 1) + masked * (4 + 4) + 1


def estimate_storage(
    found: Estimate,
    parameters: ParameterCount,
    *,
    bytes_per_row: float | None,
    width: int,
    masked: float,
    interval_seconds: float,
    file_system_bytes_per_s: float,
    keep_last: int | None,
) -> StorageLoad:
    execution, zero = found.configuration.execution, found.configuration.zero
    size = row_bytes(width, masked) if bytes_per_row is None else bytes_per_row
    on_device = replace(zero, offloads_optimizer=False, offloads_parameters=False)  # a file holds either
    states = estimate_states(parameters, execution.precision, on_device, world_size=1)
    weights = execution.bytes * parameters.total
    optimizer = states["optimizer"] + states["master_weights"]
    shares = found.world_size if zero.stage > 0 else 1
    first = optimizer / shares + (weights / shares if zero.stage == 3 else weights)
    total = weights + optimizer
    seconds = max(total / file_system_bytes_per_s, first / MAX_BYTES_PER_WRITER)
    return StorageLoad(
        read_bytes_per_second=found.rows_per_second * size,
        is_row_size_measured=bytes_per_row is not None,
        checkpoint_bytes=total,
        largest_rank_bytes=first,
        save_seconds=seconds,
        interval_seconds=interval_seconds,
        kept_bytes=None if keep_last is None else (keep_last + 1) * total,  # one more while the next is written
    )

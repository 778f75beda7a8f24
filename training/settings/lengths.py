"""The lengths of rows that a run trains on: --max_seq_length, or those of --length_schedule, each with its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import Problems, UserError, nearest
from common.words import counted
from training.plan.token_schedule import TokenSchedule

FLAG = "--length_schedule"


@dataclass(frozen=True)
class Length:
    """Rows of `length` tokens from `folders`, read once `tokens` have been seen.

    `micro` is the number of rows per micro-step and rank.
    """

    tokens: int
    length: int
    micro: int
    max_predictions: int  # masked tokens per row with --dynamic_masking; --max_predictions_per_seq scaled to the length
    folders: tuple[Path, ...]
    weights: tuple[float, ...] | None = None  # each folder's share of the rows; None: every row once per epoch


def resolve_lengths(
    points: Sequence[tuple[int, int]],
    *,
    micro: int,
    max_predictions: int,
    datasets: dict[str, dict[str, str]],
    weights: dict[str, dict[str, float]],
    prefix: Path,
    config_file: Path,
) -> tuple[Length, ...]:
    """The lengths of `points` of (tokens, length). `micro` and `max_predictions` are those of the last one."""
    problems = Problems()
    longest = points[-1][1]
    lengths = []
    for tokens, length in points:
        if str(length) not in datasets:
            found = ", ".join(sorted(datasets)) or "none"
            problems.add(
                f"{config_file}: data.mixed_seq_datasets has no entry for rows of {length} tokens (found: {found}). "
                f'Add "{length}" there, or pass another --max_seq_length or {FLAG}'
            )
            continue
        if not datasets[str(length)]:
            problems.add(
                f"{config_file}: there is no data folder for rows of {length} tokens; add one to "
                f'data.mixed_seq_datasets."{length}"'
            )
        if micro * longest % length:
            problems.add(
                f"{FLAG}: a micro-step of {counted(micro, 'row')} of {longest} tokens has {micro * longest} tokens, "
                f"not a multiple of {length}; choose lengths that divide it, or another train_micro_batch_size_per_gpu"
            )
        lengths.append(
            Length(
                tokens=tokens,
                length=length,
                micro=micro * longest // length,
                max_predictions=-(-max_predictions * length // longest),
                folders=tuple(prefix / folder for folder in datasets[str(length)].values()),
                weights=_find_weights(weights.get(str(length)), datasets[str(length)], length, config_file, problems),
            )
        )
    problems.raise_if_any()
    return tuple(lengths)


def _find_weights(
    weights: dict[str, float] | None, datasets: dict[str, str], length: int, config_file: Path, problems: Problems
) -> tuple[float, ...] | None:
    """The weights in the order of the datasets, or None; either every dataset has one, or none has."""
    if weights is None:
        return None
    where = f'{config_file}: data.mixed_seq_weights."{length}"'
    for name in weights:
        if name not in datasets:
            problems.add(f"{where} names {name!r}, which is not a dataset of that length{nearest(name, datasets)}")
    missing = [name for name in datasets if name not in weights]
    if missing:
        problems.add(f"{where} has no weight for {', '.join(missing)}; give one for every dataset, or for none")
    return tuple(weights.get(name, 1.0) for name in datasets)


def schedule_points(schedule: TokenSchedule | None, max_seq_length: int) -> tuple[tuple[int, int], ...]:
    """Points of (tokens, length); without a schedule, --max_seq_length from the beginning."""
    if schedule is None:
        return ((0, max_seq_length),)
    lengths = [length for _, length in schedule.points]
    if lengths != sorted(set(lengths)) or not all(length.is_integer() and length >= 1 for length in lengths):
        raise UserError(f"{FLAG} {schedule}: expected lengths that are whole numbers and rise, as in 0:128,900M:512")
    if lengths[-1] != max_seq_length:
        raise UserError(
            f"{FLAG} {schedule}: ends with rows of {lengths[-1]:g} tokens, but --max_seq_length, the longest, is "
            f"{max_seq_length}; pass --max_seq_length {lengths[-1]:g}"
        )
    return tuple((tokens, int(length)) for tokens, length in schedule.points)

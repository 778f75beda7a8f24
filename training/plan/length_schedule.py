"""--length_schedule: rows of one length after another in one run, each with data of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import Problems, UserError, nearest
from training.plan.token_schedule import TokenSchedule

FLAG = "--length_schedule"


@dataclass(frozen=True)
class Length:
    """Rows of `length` tokens from `tokens` seen on, out of `folders`, `micro` of them a micro-step on a rank."""

    tokens: int
    length: int
    micro: int
    max_predictions: int  # that new masks may have; a row's share of --max_predictions_per_seq
    folders: tuple[Path, ...]
    weights: tuple[float, ...] | None = None  # each folder's share of the rows; None: by size, every row once an epoch


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
    """The lengths that `points` of (tokens, length) name. `micro` and `max_predictions` are those of the last one."""
    problems = Problems()
    longest = points[-1][1]
    lengths = []
    for tokens, length in points:
        if str(length) not in datasets:
            found = ", ".join(sorted(datasets)) or "none"
            problems.add(
                f"{config_file}: data.mixed_seq_datasets has no entry for rows of {length} tokens (found: {found}); "
                f'add "{length}" there, or choose another --max_seq_length or {FLAG}'
            )
            continue
        if not datasets[str(length)]:
            problems.add(
                f"{config_file}: no data folder is named for rows of {length} tokens; name one in "
                f'data.mixed_seq_datasets."{length}"'
            )
        if micro * longest % length:
            problems.add(
                f"{FLAG}: a micro-step of {micro} rows of {longest} tokens has {micro * longest}, which rows of "
                f"{length} do not divide; choose lengths that do, or another train_micro_batch_size_per_gpu"
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
    """The datasets' weights in their own order; exactly the datasets must have one."""
    if weights is None:
        return None
    where = f'{config_file}: data.mixed_seq_weights."{length}"'
    for name in weights:
        if name not in datasets:
            problems.add(f"{where} names {name!r}, which is no dataset of that length{nearest(name, datasets)}")
    missing = [name for name in datasets if name not in weights]
    if missing:
        problems.add(f"{where} has no weight for {', '.join(missing)}; give one for every dataset, or for none")
    return tuple(weights.get(name, 1.0) for name in datasets)


def parse_lengths(text: str | None, max_seq_length: int) -> tuple[tuple[int, int], ...]:
    """Points of (tokens, length); without a schedule, --max_seq_length from the beginning."""
    if text is None:
        return ((0, max_seq_length),)
    schedule = TokenSchedule.parse(text, FLAG)
    lengths = [length for _, length in schedule.points]
    if lengths != sorted(set(lengths)) or not all(length.is_integer() and length >= 1 for length in lengths):
        raise UserError(f"{FLAG} {text}: lengths must be whole numbers that rise, as in 0:128,900M:512")
    if lengths[-1] != max_seq_length:
        raise UserError(
            f"{FLAG} {text}: ends with rows of {lengths[-1]:g}, but --max_seq_length is {max_seq_length}; it is the "
            f"longest: pass --max_seq_length {lengths[-1]:g}"
        )
    return tuple((tokens, int(length)) for tokens, length in schedule.points)

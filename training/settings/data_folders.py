"""The folders of a run's data: lengths of rows and their folders, what paths are relative to, mirrors of URLs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from common.errors import Problems, UserError, nearest
from common.files import check_folder_to_write
from common.stores import Store
from common.words import counted
from data.shards.cache import ShardCache
from data.shards.folder import list_shards
from data.shards.mirror import Mirror
from data.tokenizer import TOKENIZER_FILES
from training.plan.step_plan import TokenSchedule
from training.settings.flags import CommandLine, DataFlags
from training.settings.model_file import DataSection, ModelFile, section_for_length

FLAG = "--length_schedule"
DATA = "--data_path_prefix"
VALIDATION = "--validation_data_path_prefix"
EXPECTED = "expected the one that the model JSON's folders are relative to"
MAX_FOLDERS = 100  # that are tried, of a folder with many
MAX_SHOWN = 3


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
    points: Sequence[tuple[int, int]], micro: int, data: DataSection, flags: DataFlags, config_file: Path
) -> tuple[Length, ...]:
    """The lengths of `points` of (tokens, length). `micro` and --max_predictions_per_seq are those of the last one."""
    problems = Problems()
    longest = points[-1][1]
    lengths = []
    for tokens, length in points:
        find = partial(section_for_length, data.mixed_seq_datasets, length, "data.mixed_seq_datasets", config_file)
        datasets = problems.attempt(find)
        if datasets is None:
            continue
        if not datasets:
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
                max_predictions=-(-flags.max_predictions_per_seq * length // longest),
                folders=tuple(flags.data_folder / folder for folder in datasets.values()),
                weights=_find_weights(data.mixed_seq_weights.get(str(length)), datasets, length, config_file, problems),
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


def check_prefixes(flags: CommandLine, model_file: ModelFile | None, problems: Problems) -> bool:
    """Whether the folders exist, and any of the model JSON's paths in them."""
    found = [
        problems.attempt(lambda: _check_data_prefix(flags.data, model_file)),
        problems.attempt(lambda: _check_folder(VALIDATION, flags.data.validation_data_folder, [])),
    ]
    return all(found)


def _check_folder(flag: str, folder: Path | None, folders: list[str]) -> bool:
    if folder is not None and not folder.is_dir():
        raise UserError(f"{flag} {folder}: no such folder; {EXPECTED}; {_remedy(flag, _find_fitting(folder, folders))}")
    return True


def _check_data_prefix(flags: DataFlags, model_file: ModelFile | None) -> bool:
    prefix, folders, others = flags.data_folder, [], []
    if model_file is not None:
        folders = list(model_file.data.mixed_seq_datasets.get(str(flags.max_seq_length), {}).values())
        others = list(_other_paths(model_file, flags))
    _check_folder(DATA, prefix, folders)
    named = dict.fromkeys([*folders, *others])
    missing = [name for name in named if not (prefix / name).exists()]
    if folders and len(missing) == len(named):
        fitting = _find_fitting(prefix, folders)
        if fitting or len(missing) > 1:
            raise UserError(
                f"{DATA} {prefix}: contains none of the model JSON's paths ({', '.join(missing)}); {EXPECTED}; "
                f"{_remedy(DATA, fitting)}"
            )
    return True


def _remedy(flag: str, fitting: list[str]) -> str:
    return f"pass {flag} {' or '.join(fitting)}" if fitting else "pass it"


def _other_paths(model_file: ModelFile, flags: DataFlags) -> Iterator[str]:
    """The other paths below the prefix; a tokenizer may also be relative to the current folder, or a hub's name."""
    name = model_file.bert_token_file
    if name is not None and "/" in name and not Path(name).exists():
        yield name
    if model_file.validation is not None and flags.validation_data_path_prefix is None:
        yield model_file.validation.path


def _find_fitting(prefix: Path, folders: list[str]) -> list[str]:
    """Folders near `prefix` in which all of `folders` have shards, those with the most similar path first."""
    prefix = prefix.absolute()
    base = next(path for path in (prefix, *prefix.parents) if path.is_dir())  # a name that does not exist: misspelt
    below = islice(chain(base.glob("*/"), base.glob("*/*/")), MAX_FOLDERS)
    near = dict.fromkeys([*below, base, *islice(base.parents, 3), Path().absolute()])
    fitting = [str(place) for place in near if folders and all(_has_shards(place / name) for name in folders)]
    return get_close_matches(str(prefix), fitting, n=MAX_SHOWN, cutoff=0.0)


def _has_shards(folder: Path) -> bool:
    try:
        return folder.is_dir() and bool(list_shards(folder))
    except OSError:  # a folder that may not be read: there is only no hint
        return False


def open_cache(flags: DataFlags, num_readers: int, problems: Problems) -> ShardCache | None:
    """The cache of a run whose data is behind a URL; None for other runs."""
    if not flags.urls or flags.data_cache is None:
        return None
    before = len(problems.messages)
    check_folder_to_write(flags.data_cache, "--data_cache", problems)
    return None if len(problems.messages) > before else ShardCache(flags.data_cache, flags.data_cache_gb, num_readers)


def with_mirrors(
    flags: CommandLine, model_file: ModelFile | None, cache: ShardCache | None, problems: Problems
) -> tuple[CommandLine, bool]:
    """The flags with a local folder for each URL, and whether all of them could be read."""
    folders: dict[str, Path] = {}
    is_complete = True
    for name, flag in (("data_path_prefix", DATA), ("validation_data_path_prefix", VALIDATION)):
        url = problems.attempt(partial(getattr, flags.data, name))
        if not isinstance(url, str):
            continue
        folders[name], is_filled = Path(url), None
        if cache is not None and (store := problems.attempt(partial(Store, url, flag))) is not None:
            mirror = Mirror(store, cache)
            folders[name] = mirror.folder
            if model_file is not None:
                is_filled = problems.attempt(partial(_fill, mirror, flags, model_file, flag))
        is_complete = is_complete and bool(is_filled)
    return replace(flags, data=flags.data.model_copy(update=folders)), is_complete


def _fill(mirror: Mirror, flags: CommandLine, model_file: ModelFile, flag: str) -> bool:
    """Copy manifests and tokenizer that are below the URL."""
    data, problems = flags.data, Problems()
    if flag == DATA:
        for _, length in schedule_points(flags.training.length_schedule, data.max_seq_length):
            for folder in model_file.data.mixed_seq_datasets.get(str(length), {}).values():
                if _is_below(folder):
                    problems.attempt(partial(_add_folder, mirror, folder))
        problems.raise_if_any()
        _add_tokenizer(mirror, model_file.bert_token_file)
    if model_file.validation is not None and (flag == VALIDATION or data.validation_data_path_prefix is None):
        path = model_file.validation.path
        if _is_below(path):  # find_validation_folder() warns if there is neither
            mirror.add_shards(f"{path}/{data.max_seq_length}")
            mirror.add_shards(path)
    mirror.folder.mkdir(parents=True, exist_ok=True)  # where all of it is elsewhere
    return True


def _add_folder(mirror: Mirror, folder: str) -> None:
    if not mirror.add_shards(folder):
        raise mirror.refuse_missing(folder)


def _add_tokenizer(mirror: Mirror, name: str | None) -> None:
    """A file, or a folder with some of the usual files; other names are local files, or names on a hub."""
    if name is None or not _is_below(name) or Path(name).exists():
        return
    try:
        if not (PurePosixPath(name).suffix and mirror.add_file(name)):
            for file in TOKENIZER_FILES:
                mirror.add_file(f"{name}/{file}")
    except UserError:
        pass  # a store may deny what it does not have; find_tokenizer() reports a missing tokenizer


def _is_below(name: str) -> bool:
    return not PurePosixPath(name).is_absolute()

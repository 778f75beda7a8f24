"""Data behind a URL: a local folder takes its place, with what the model JSON names below it."""

from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from common.errors import Problems, UserError
from common.files import check_folder_to_write
from common.stores import Store
from data.shards.cache import ShardCache
from data.shards.mirror import Mirror
from data.tokenizer import TOKENIZER_FILES
from training.settings.flags import CommandLine, DataFlags
from training.settings.lengths import schedule_points
from training.settings.model_file import ModelFile
from training.settings.prefixes import DATA, VALIDATION


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
    data = flags.data
    if flag == DATA:
        _add_training_data(mirror, flags, model_file)
        _add_tokenizer(mirror, model_file.bert_token_file)
    if model_file.validation is not None and (flag == VALIDATION or data.validation_data_path_prefix is None):
        path = model_file.validation.path
        if _is_below(path):  # find_validation_folder() warns if there is neither
            mirror.add_shards(f"{path}/{data.max_seq_length}")
            mirror.add_shards(path)
    mirror.folder.mkdir(parents=True, exist_ok=True)  # where all of it is elsewhere
    return True


def _add_training_data(mirror: Mirror, flags: CommandLine, model_file: ModelFile) -> None:
    problems = Problems()
    datasets = model_file.data.mixed_seq_datasets
    for _, length in schedule_points(flags.training.length_schedule, flags.data.max_seq_length):
        for folder in datasets.get(str(length), {}).values():
            if _is_below(folder):
                problems.attempt(partial(_add_folder, mirror, folder))
    problems.raise_if_any()


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

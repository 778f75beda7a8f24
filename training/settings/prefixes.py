"""The folders that the model JSON's paths are relative to: one message for a wrong one, with the folder that fits."""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from common.errors import Problems, UserError
from data.shards.folder import list_shards
from training.settings.flags import CommandLine, DataFlags
from training.settings.model_file import ModelFile

DATA = "--data_path_prefix"
VALIDATION = "--validation_data_path_prefix"
EXPECTED = "expected the one that the model JSON's folders are relative to"
MAX_FOLDERS = 100  # that are tried, of a folder with many
MAX_SHOWN = 3


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
    prefix = flags.data_folder
    folders = [] if model_file is None else _data_folders(model_file, flags)
    _check_folder(DATA, prefix, folders)
    named = folders if model_file is None else [*folders, *_other_paths(model_file, flags)]
    missing = [name for name in dict.fromkeys(named) if not (prefix / name).exists()]
    if folders and len(missing) == len(set(named)):
        fitting = _find_fitting(prefix, folders)
        if fitting or len(missing) > 1:
            raise UserError(
                f"{DATA} {prefix}: contains none of the model JSON's paths ({', '.join(missing)}); {EXPECTED}; "
                f"{_remedy(DATA, fitting)}"
            )
    return True


def _remedy(flag: str, fitting: list[str]) -> str:
    return f"pass {flag} {' or '.join(fitting)}" if fitting else "pass it"


def _data_folders(model_file: ModelFile, flags: DataFlags) -> list[str]:
    return list(model_file.data.mixed_seq_datasets.get(str(flags.max_seq_length), {}).values())


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

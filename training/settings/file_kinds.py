"""Which of the two JSON files a file is: told by its keys, of which the two kinds share none."""

from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from training.settings.deepspeed_file import KNOWN_KEYS
from training.settings.json_files import load_json
from training.settings.model_file import ModelFile


def is_for_deepspeed(path: Path) -> bool:
    """Whether `path` holds keys of a DeepSpeed JSON and not one of a model JSON."""
    return _has_only(path, KNOWN_KEYS, ModelFile.model_fields)


def is_for_model(path: Path) -> bool:
    return _has_only(path, ModelFile.model_fields, KNOWN_KEYS)


def _has_only(path: Path, keys: Iterable[str], others: Iterable[str]) -> bool:
    try:
        content = load_json(path, "a JSON file")
    except UserError:
        return False  # told by who loads it
    return not content.keys().isdisjoint(keys) and content.keys().isdisjoint(others)


def check_kinds(model_path: Path, engine_path: Path) -> None:
    """One line for a file of the other kind, instead of one for each of its keys."""
    is_engine, is_model = is_for_deepspeed(model_path), is_for_model(engine_path)
    if is_engine and is_model:
        raise UserError(
            f"--cf {model_path} is a DeepSpeed JSON and --deepspeed_config {engine_path} a model JSON: the two look "
            f"swapped; exchange them"
        )
    if is_engine:
        raise UserError(f"--cf {model_path}: is a DeepSpeed JSON, expected a model JSON such as bert_base.json")
    if is_model:
        raise UserError(
            f"--deepspeed_config {engine_path}: is a model JSON, expected a DeepSpeed JSON such as ds_config.json"
        )

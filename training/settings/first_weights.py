"""--use_pretrain: the folder that a run takes its first weights from, and the architecture that it describes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from common.errors import UserError
from common.weights import EXPORT_AGAIN, find_weight_files
from nvidia.config import BertConfig
from nvidia.interop.families import family_of_type
from nvidia.interop.stock_config import from_stock_config

# The pooler and the next-sentence head, for which most stock classes have no parameters.
EXTRA_WEIGHTS = "next_sentence.safetensors"
_SENTENCE_HEAD = "cls.seq_relationship.weight"


@dataclass(frozen=True)
class FirstWeights:
    """A Hugging Face folder."""

    folder: Path
    config: BertConfig  # the model that its config.json describes, with a sentence head if the folder has one
    is_pre_ln: bool


def find_first_weights(use_pretrain: str | None, model_file: str | None, path: Path) -> FirstWeights | None:
    """--use_pretrain's folder, or `model_file`, the model JSON's bert_model_file, if the flag has no value."""
    if use_pretrain is None:
        return None
    name = use_pretrain or model_file
    if name is None:
        raise UserError(
            f"--use_pretrain: no folder is given; expected a folder with a model in Hugging Face's layout; pass it "
            f"after the flag, or set bert_model_file in {path}"
        )
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(
            f"--use_pretrain: {name} is not a folder; expected a Hugging Face folder with model.safetensors (training "
            f"downloads nothing; download it first)"
        )
    content = read_stock_config(folder)
    try:
        config = from_stock_config(content)
    except UserError as error:
        raise UserError(str(error), [f"--use_pretrain {folder}: {part}" for part in error.parts]) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # strings instead of numbers
        reason = " ".join(str(error).split())
        raise UserError(
            f"--use_pretrain {folder}: config.json cannot be understood ({reason}); {EXPORT_AGAIN}"
        ) from None
    head = "nsp" if _has_sentence_head(folder) else "none"
    is_pre_ln = family_of_type(content["model_type"]).is_pre_ln
    return FirstWeights(folder, replace(config, sentence_head=head), is_pre_ln)


def read_stock_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a model's configuration ({error}); {EXPORT_AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains a {type(content).__name__}, not an object; {EXPORT_AGAIN}")
    return content


def _has_sentence_head(folder: Path) -> bool:
    for path in (*find_weight_files(folder), folder / EXTRA_WEIGHTS):
        try:
            with safe_open(path, "pt") as tensors:
                if _SENTENCE_HEAD in tensors.keys():  # noqa: SIM118 (not a dict)
                    return True
        except (OSError, SafetensorError):
            continue  # reported when the weights are loaded
    return False

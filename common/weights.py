"""The weights of a Hugging Face folder: which files, the tensors in them, and a digest of the model."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, describe_error
from common.files import file_digest

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = "tokenizer.json vocab.txt vocab.json sentencepiece.bpe.model spiece.model merges.txt".split()
# Files that determine the results of a model, beside its weights.
IDENTITY = ("config.json", *TOKENIZER_FILES, "tokenizer_config.json")
EXPORT_AGAIN = "expected a model in Hugging Face's layout. Copy the folder again, or write it with scripts/export_hf.py"


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors file of a Hugging Face folder, or the parts that its index lists in its place."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return [folder / WEIGHTS]
    try:
        parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{index}: cannot be read as an index of weights ({error}); expected an object weight_map with the file of "
            f"each tensor. Copy the folder again"
        ) from None
    for part in parts:
        if not isinstance(part, str) or Path(part).name != part:
            raise UserError(
                f"{index}: names {part!r} as a file of weights; expected names of files beside it. Copy the "
                f"folder again"
            )
    return [folder / part for part in parts]


def read_folder_tensors(folder: Path) -> "dict[str, Tensor]":
    """All tensors of a Hugging Face folder, whose weights are in one file or in several with an index."""
    return {name: tensor for path in find_weight_files(folder) for name, tensor in read_tensors(path).items()}


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file."""
    from safetensors import SafetensorError  # imported here: only few users of this module need torch
    from safetensors.torch import load_file

    try:
        with path.open("rb"):  # safetensors reports every error as "no such file"
            pass
        return load_file(path)
    except (OSError, SafetensorError) as error:
        unreadable = f"{path}: cannot be read as safetensors ({error}); {EXPORT_AGAIN}"
        raise UserError(describe_error(error) or unreadable) from None


def digest_of(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """A digest of a model's weights, configuration and tokenizer."""
    files = [p for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".bin") or p.name in IDENTITY]
    return digest_of([(path.name, file_digest(path)) for path in files])

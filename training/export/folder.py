"""The files of an exported Hugging Face folder, without the libraries that training needs."""

import json
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import Problems
from common.files import check_folder_to_write, give_usual_mode
from common.weights import WEIGHTS

MARK = {"written_by": "export_hf"}  # in the metadata of the weights: an export may replace this folder's files
CARD_HEADING = "## Measured on the validation shards"


def check_export_folder(folder: Path, flag: str, problems: Problems) -> None:
    """Note why an export cannot be written to `folder`, which `flag` named: it would replace unrelated files."""
    before = len(problems.messages)
    check_folder_to_write(folder, flag, problems)
    if len(problems.messages) > before or not folder.is_dir():
        return
    # An export that was killed during its first file leaves *.tmp.
    found = sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp")
    if found and not is_export(folder):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        problems.add(
            f"{flag} {folder}: is not empty and not an earlier export (found: {listed}); expected a new folder or an "
            f"empty one. Pass a new folder, or empty this one"
        )


def is_export(folder: Path) -> bool:
    """Whether the weights or the model card were written by an export of this project."""
    with suppress(OSError, SafetensorError), safe_open(folder / WEIGHTS, "pt") as weights:
        if MARK.items() <= (weights.metadata() or {}).items():
            return True
    with suppress(OSError, UnicodeDecodeError):
        return CARD_HEADING in (folder / "README.md").read_text()
    return False


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt", **MARK}
    )
    sort_metadata(temporary)
    give_usual_mode(temporary)
    temporary.replace(path)


def sort_metadata(path: Path) -> None:
    """Give equal weights equal bytes: safetensors writes the entries of the metadata in a random order."""
    with path.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))

"""Results of evaluation.run for one model, found again by the digest of its files."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.files import file_digest

REPORT = "report.json"  # in the output folder of evaluation.run
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "merges.txt",
)
IDENTITY = ("config.json", *TOKENIZER_FILES, "tokenizer_config.json")


def digest_of(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """Of a model's weights, configuration and tokenizer."""
    files = [p for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".bin") or p.name in IDENTITY]
    return digest_of([(path.name, file_digest(path)) for path in files])


def find_card_section(reports: Iterable[Path], model: Path) -> str | None:
    """The section for the card of the Hugging Face folder `model` from the first report.json that has its results.

    A report of other weights, or one that cannot be read, is passed over.
    """
    existing = [path for path in reports if path.is_file()]
    digest = folder_digest(model) if existing else None
    for path in existing:
        try:
            report = json.loads(path.read_bytes())
            name = next((entry["name"] for entry in report["models"] if entry["digest"] == digest), None)
            if name is not None:
                from evaluation.report import card_section  # takes seconds, with transformers

                return card_section(report, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None

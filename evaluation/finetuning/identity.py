"""The identity of a Hugging Face folder: a digest of the files that determine its results. Imports no large library."""

import hashlib
from pathlib import Path
from typing import Any

from common.files import file_digest

TOKENIZER_FILES = "tokenizer.json vocab.txt vocab.json sentencepiece.bpe.model spiece.model merges.txt".split()
IDENTITY = ("config.json", *TOKENIZER_FILES, "tokenizer_config.json")


def digest_of(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """A digest of a model's weights, configuration and tokenizer."""
    files = [p for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".bin") or p.name in IDENTITY]
    return digest_of([(path.name, file_digest(path)) for path in files])

"""Texts to prepare, the command with the flags of a small run, and its output."""

import hashlib
import random
from pathlib import Path

from data import prepare
from data.shards.dataset import PretrainingDataset, open_dataset

ROOT = Path(__file__).parents[3]
WORDS = [
    f"{stem}{ending}" for stem in ("walk", "talk", "jump", "think", "look") for ending in ("", "s", "ed", "ing", "er")
]


def write_corpus(path: Path, documents: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("w") as stream:
        for number in range(documents):
            for _ in range(rng.randint(1, 12)):
                stream.write(" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) + f" {number}.\n")
            stream.write("\n")
    return path


def write_one_document(path: Path, layout: str, megabytes: int = 1, seed: int = 5) -> Path:
    """One document: lines broken anywhere, or one sentence per line and no blank line."""
    rng = random.Random(seed)
    sentences = [
        f"{' '.join(rng.choices(WORDS, k=rng.randint(3, 20)))} {n}.".capitalize() for n in range(15_000 * megabytes)
    ]
    if layout == "sentences":
        path.write_text("\n".join(sentences))
    else:
        words = " ".join(sentences).split(" ")
        lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
        path.write_text("".join(line + "\n" * (1 + (number % 40 == 0)) for number, line in enumerate(lines)))
    return path


def run(corpus: Path | str, output: Path | str, *extra: str) -> None:
    arguments = [
        "--input", str(corpus), "--output_dir", str(output), "--vocab_size", "300", "--max_seq_length", "32",
        "--dupe_factor", "2", "--shard_rows", "3000", "--workers", "1", "--validation_share", "0.1", *extra,
    ]  # fmt: skip
    assert prepare.main(arguments) == 0


def digests(folder: Path) -> dict[str, str]:
    found = sorted([*folder.glob("*/*.hdf5"), *folder.glob("tokenizer/*")])
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def opened(folder: Path, split: str = "training", length: int = 32) -> PretrainingDataset:
    return open_dataset([folder], split=split, max_seq_length=length, max_predictions_per_seq=80)  # type: ignore[arg-type]

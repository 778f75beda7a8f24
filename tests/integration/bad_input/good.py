"""A small setup in which every command works, for each case of bad input to break."""

import hashlib
import json
from pathlib import Path

from data.prepare import main as prepare
from data.tokenizer import load_tokenizer
from scripts.export_hf import main as export
from tests.support import VOCAB, write_project
from tests.unit.training.in_process import run_here
from training.runtime.lock import LOCK

WORDS = [f"word{number}" for number in range(VOCAB - 5)]


def build_good(root: Path) -> None:
    """Both JSON files, shards, a tokenizer, text, prepared shards, a run with two checkpoints, and its export."""
    words = write_project(root)
    (root / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))
    )
    load_tokenizer(root / "vocab.txt").save(root / "tokenizer")
    model = json.loads((root / "model.json").read_text())
    (root / "model.json").write_text(json.dumps({**model, "bert_token_file": "tokenizer"}, indent=2))
    run_here([*words, "--max_steps", "2", "--save_every_steps", "1"])
    export(export_words(root))
    (root / "text").mkdir()
    sentences = [f"{a} {b} {a} is a sentence about {b} ." for a in WORDS[:20] for b in WORDS[20:30]]
    (root / "text" / "a.txt").write_text("\n\n".join("\n".join(sentences[i : i + 5]) for i in range(0, 200, 5)))
    prepare([*prepare_words(root), "--output_dir", f"{root}/prepared"])


def train_words(root: Path) -> list[str]:
    return [
        *("--cf", f"{root}/model.json", "--deepspeed_config", f"{root}/deepspeed.json", "--output_dir", f"{root}/new"),
        *("--data_path_prefix", f"{root}", "--max_seq_length", "24", "--max_predictions_per_seq", "4"),
        *("--max_steps", "2"),
    ]


def prepare_words(root: Path) -> list[str]:
    return [
        *("--input", f"{root}/text", "--output_dir", f"{root}/fresh", "--vocab_file", f"{root}/vocab.txt"),
        *("--max_seq_length", "24", "--max_predictions_per_seq", "4", "--workers", "1", "--dupe_factor", "1"),
    ]


def corpus_words(root: Path) -> list[str]:
    return ["--output", f"{root}/corpus", "--workers", "1"]


def inspect_words(root: Path) -> list[str]:
    return [f"{root}/prepared/24", "--report_dir", f"{root}/report"]


def export_words(root: Path) -> list[str]:
    return [
        *("--checkpoint", f"{root}/out/saved_models/tiny", "--output", f"{root}/hf"),
        *("--tokenizer", f"{root}/tokenizer", "--metrics", f"{root}/out/runs/tiny/metrics.jsonl"),
    ]


def predict_words(root: Path) -> list[str]:
    return ["--model", f"{root}/hf"]


def plot_words(root: Path) -> list[str]:
    return [f"{root}/out/runs/tiny", "--output", f"{root}/loss.png"]


def compare_words(root: Path) -> list[str]:
    return [
        *("--metrics", f"{root}/out/runs/tiny/metrics.jsonl", "--data", f"{root}/data"),
        *("--max_seq_length", "24", "--max_predictions_per_seq", "4"),
    ]


def phases_words(root: Path) -> list[str]:
    return [
        *("--cf", f"{root}/model.json", "--deepspeed_configs", f"{root}/deepspeed.json", f"{root}/deepspeed.json"),
        *("--output_dir", f"{root}/new", "--name", "two", "--lengths", "24", "16", "--predictions", "4", "4"),
        *("--data_path_prefix", f"{root}", "--ranks", "1"),
    ]


def doctor_words(root: Path) -> list[str]:
    return ["--output_dir", f"{root}/new"]


def snapshot(root: Path) -> dict[str, str]:
    """Every file, link and folder below `root`, with a digest of its content."""
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.name != LOCK):  # which names its last holder
        if path.is_symlink():
            content = f"link to {path.readlink()}"
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = "folder"
        found[path.relative_to(root).as_posix()] = content
    return found

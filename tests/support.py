"""What several tests need: small data in NVIDIA's layout, small configs, and the real launcher with a time limit."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

PROJECT = Path(__file__).resolve().parent.parent
VOCAB = 61
PAD, UNK, CLS, SEP, MASK = range(5)


def make_rows(num_rows: int, width: int, predictions: int, seed: int, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Rows of two segments and varying length. Each token follows from the one before, so that they can be learned."""
    generator = np.random.default_rng(seed)
    ids = np.zeros((num_rows, width), np.int32)
    mask = np.zeros((num_rows, width), np.int8)
    segments = np.zeros((num_rows, width), np.int8)
    positions = np.zeros((num_rows, predictions), np.int32)
    labels = np.zeros((num_rows, predictions), np.int32)
    follows = generator.integers(0, 2, num_rows).astype(np.int8)
    for row in range(num_rows):
        length = int(generator.integers(width // 2, width + 1))
        tokens = 5 + (generator.integers(0, vocab - 5) + np.arange(length)) % (vocab - 5)
        tokens[0], tokens[length // 2], tokens[length - 1] = CLS, SEP, SEP
        candidates = [place for place in range(1, length) if tokens[place] not in (SEP, CLS)]
        count = int(generator.integers(1, min(predictions, len(candidates)) + 1))
        chosen = np.sort(generator.choice(candidates, count, replace=False))
        positions[row, :count] = chosen
        labels[row, :count] = tokens[chosen]
        tokens[chosen] = MASK
        ids[row, :length] = tokens
        mask[row, :length] = 1
        segments[row, length // 2 + 1 : length] = 1
    return {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": segments,
        "masked_lm_positions": positions,
        "masked_lm_ids": labels,
        "next_sentence_labels": follows,
    }


def write_nvidia_shard(path: Path, rows: dict[str, np.ndarray]) -> None:
    """A file as NVIDIA's tools write it: gzip, no attributes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in rows.items():
            file.create_dataset(name, data=values, compression="gzip")


def write_json(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
    return path


def write_project(folder: Path, *, width: int = 24, predictions: int = 4, **deepspeed: Any) -> list[str]:
    """Data, model JSON and DeepSpeed JSON for a tiny run below `folder`; the launcher's words for it."""
    for index, num_rows in enumerate((37, 5, 22)):
        rows = make_rows(num_rows, width, predictions, seed=index)
        write_nvidia_shard(folder / "data" / f"wiki_training_{index}.hdf5", rows)
    write_nvidia_shard(folder / "data" / "wiki_test_0.hdf5", make_rows(11, width, predictions, seed=9))
    model = {
        "name": "tiny",
        "bert_model_config": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
        },
        "data": {"mixed_seq_datasets": {str(width): {"wiki": "data"}}},
        "mixed_seq_training": {
            str(width): {
                "num_epochs": 100,
                "warmup_proportion": 0.1,
                "learning_rate": 0.003,
                "total_training_steps": 60,
            }
        },
        "validation": {"path": "data"},
    }
    engine = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}, **deepspeed}
    write_json(folder / "model.json", model)
    write_json(folder / "deepspeed.json", engine)
    return tiny_words(folder, width, predictions)


def tiny_words(folder: Path, width: int = 24, predictions: int = 4) -> list[str]:
    """The launcher's words for what write_project() wrote."""
    return [
        *("--cf", str(folder / "model.json"), "--deepspeed_config", str(folder / "deepspeed.json")),
        *("--output_dir", str(folder / "out"), "--data_path_prefix", str(folder)),
        *("--max_seq_length", str(width), "--max_predictions_per_seq", str(predictions), "--print_steps", "1"),
    ]


# Rows of 12 have about 9 real tokens and 16 of them make a step: the switch comes with step 7 or so.
LENGTH_SCHEDULE = "0:12,900:24"


def write_two_lengths(folder: Path, **deepspeed: Any) -> list[str]:
    """The tiny project, with rows of 12 beside those of 24, and a tokenizer."""
    words = write_project(folder, **deepspeed)
    for index, num_rows in enumerate((41, 30)):
        shard = folder / "short" / f"wiki_training_{index}.hdf5"
        write_nvidia_shard(shard, make_rows(num_rows, 12, 2, seed=20 + index))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    content = json.loads((folder / "model.json").read_text())
    content["data"]["mixed_seq_datasets"]["12"] = {"wiki": "short"}
    (folder / "model.json").write_text(json.dumps({**content, "bert_token_file": "vocab.txt"}))
    return [*words, "--length_schedule", LENGTH_SCHEDULE]


def add_probes(folder: Path) -> list[str]:
    """A tokenizer for what write_project() wrote, minimal pairs and labelled texts; the launcher's words for them.

    Words follow each other as the tokens of the data do; in a bad sentence two are exchanged.
    """
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    model = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**model, "bert_token_file": "vocab.txt"}))
    generator = np.random.default_rng(0)
    pairs, rows = [], ["text,label"]
    for number in range(90):
        first = int(generator.integers(0, VOCAB - 5))
        words = [f"word{(first + i) % (VOCAB - 5)}" for i in range(5 + number % 5)]
        swapped = [*words[:1], words[2], words[1], *words[3:]]
        pairs.append({"good": " ".join(words), "bad": " ".join(swapped), "group": number % 3})
        rows.append(f"{' '.join(words if number % 2 else swapped)},{number % 2}")
    (folder / "order.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    (folder / "rows.csv").write_text("\n".join(rows))
    columns = {"good": "good", "bad": "bad", "group": "group"}
    task = {"kind": "minimal_pairs", "format": "jsonl", "metrics": ["accuracy"], "dev": "order.jsonl"}
    path = write_json(folder / "order.json", {**task, "columns": columns})
    return ["--probe", str(path), str(folder / "rows.csv"), "--probe_data", str(folder)]


# Below the ports that the system gives to connections, so that none of those takes one before the test does.
FIRST_PORT, PORTS_PER_WORKER, MAX_WORKERS = 20_000, 1_000, 12
_port_numbers = count(os.getpid())


def free_port() -> int:
    """A port for a test to listen on later. Each worker of pytest-xdist has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_WORKERS
    for number in islice(_port_numbers, PORTS_PER_WORKER):
        port = FIRST_PORT + worker * PORTS_PER_WORKER + number % PORTS_PER_WORKER
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port")


def run_command(
    command: list[str], *, timeout: float = 600, env: dict[str, str] | None = None, cwd: Path = PROJECT
) -> subprocess.CompletedProcess[str]:
    """Run to the end, or kill the whole process group and fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT), **(env or {})}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout} s\n{out[-4000:]}\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_plain(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """The launcher under plain python."""
    return run_command([sys.executable, "deepspeed_train.py", *words], **options)


def with_slow_steps(words: list[str], seconds: float = 0.1) -> list[str]:
    """The command of a run that leaves time for signals, on a fast machine too."""
    faults = json.dumps([{"kind": "slow_steps", "seconds": seconds}])
    return [sys.executable, "-m", "tests.faults", faults, "deepspeed_train.py", *words]


def run_deepspeed(words: list[str], num_ranks: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """The launcher under the real `deepspeed` command."""
    launcher = ["deepspeed", "--num_gpus", str(num_ranks), "--master_port", str(free_port())]
    return run_command([*launcher, "deepspeed_train.py", *words], **options)


def read_metrics(folder: Path, kind: str, job: str = "tiny") -> list[dict[str, Any]]:
    lines = (folder / "out" / "runs" / job / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]

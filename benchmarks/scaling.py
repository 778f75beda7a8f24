"""Two ranks with half the cores each against one rank with all, at equal global batch, under the real launcher.

Prints a table and, as its last line, JSON with the key `two_ranks_over_one`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import run_command
from common.help import Parser, positive_int
from tests.support import free_port, make_rows, write_json, write_nvidia_shard

PROJECT = Path(__file__).resolve().parents[1]
WIDTH, PREDICTIONS, VOCAB = 128, 20, 8192


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scaling.py", description=__doc__)
    parser.add_argument("--hidden_size", type=positive_int, default=256, metavar="H", help="(default: 256)")
    parser.add_argument("--layers", type=positive_int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--batch", type=positive_int, default=256, metavar="ROWS", help="rows per step (default: 256)")
    parser.add_argument("--steps", type=positive_int, default=5, metavar="N", help="steps a run (default: 5)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2], help="ZeRO stage (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = write_files(folder, flags)
        for turn in range(flags.rounds):  # in turns, so that a disturbance meets both
            for ranks in speeds:
                job = f"ranks_{ranks}_round_{turn}"
                speeds[ranks].append(measure(folder, [*words, "--job_name", job], ranks, job))
    print(f"{'ranks':>6} {'threads each':>13} {'tokens/s, median':>17} {'each run':>10}")
    cores = len(os.sched_getaffinity(0))
    for ranks, found in speeds.items():
        each = ", ".join(f"{speed:,.0f}" for speed in found)
        print(f"{ranks:>6} {max(1, cores // ranks):>13} {statistics.median(found):>17,.0f}   {each}")
    ratio = statistics.median(speeds[2]) / statistics.median(speeds[1])
    print(json.dumps({"two_ranks_over_one": round(ratio, 4), "tokens_per_second": speeds, **vars(flags)}))
    return 0


def write_files(folder: Path, flags: argparse.Namespace) -> list[str]:
    """Write data and both JSON files; return the launcher's arguments. Row lengths vary as usual."""
    write_nvidia_shard(folder / "data" / "a_training_0.hdf5", make_rows(2048, WIDTH, PREDICTIONS, seed=1, vocab=VOCAB))
    model: dict[str, Any] = {
        "name": "scaling",
        "bert_model_config": {
            "vocab_size": VOCAB,
            "hidden_size": flags.hidden_size,
            "num_hidden_layers": flags.layers,
            "num_attention_heads": max(1, flags.hidden_size // 64),
            "intermediate_size": 4 * flags.hidden_size,
        },
        "data": {"mixed_seq_datasets": {str(WIDTH): {"rows": "data"}}},
        "mixed_seq_training": {
            str(WIDTH): {
                "num_epochs": 100,
                "warmup_proportion": 0.0,
                "learning_rate": 1e-4,
                "total_training_steps": flags.steps,
            }
        },
    }
    deepspeed = {"train_batch_size": flags.batch, "zero_optimization": {"stage": flags.stage}}
    return [
        *("--cf", str(write_json(folder / "model.json", model))),
        *("--deepspeed_config", str(write_json(folder / "deepspeed.json", deepspeed))),
        *("--output_dir", str(folder / "out"), "--data_path_prefix", str(folder)),
        *("--max_seq_length", str(WIDTH), "--max_predictions_per_seq", str(PREDICTIONS)),
        *("--print_steps", "1", "--keep_last", "1"),
    ]


def measure(folder: Path, words: list[str], ranks: int, job: str) -> float:
    """Real tokens per second of a run without its first third, which warms up."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    launcher = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), "deepspeed_train.py"]
    outcome = subprocess.run(
        [*launcher, *words], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if outcome.returncode != 0:
        raise RuntimeError(outcome.stderr[-3000:])
    lines = (folder / "out" / "runs" / job / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    timed = rows[len(rows) // 3 :]
    seconds = sum(row["seconds_per_step"] * row["window_steps"] for row in timed)
    tokens = sum(row["tokens_per_second"] * row["seconds_per_step"] * row["window_steps"] for row in timed)
    return tokens / seconds


if __name__ == "__main__":
    run_command(main)

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.small_runs import write_run
from common.errors import run_command
from common.help import Parser, positive_int
from tests.support import free_port

PROJECT = Path(__file__).resolve().parents[1]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scaling.py", description=__doc__)
    parser.add_argument("--hidden_size", type=positive_int, default=256, metavar="H", help="(default: 256)")
    parser.add_argument("--layers", type=positive_int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--batch", type=positive_int, default=256, metavar="ROWS", help="rows per step (default: 256)")
    parser.add_argument("--steps", type=positive_int, default=5, metavar="N", help="steps per run (default: 5)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2], help="ZeRO stage (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = write_run(
            folder, flags.hidden_size, flags.layers, flags.stage,
            rows=2048, width=128, predictions=20, vocab=8192, steps=flags.steps, batch=flags.batch,
        )  # fmt: skip
        for turn in range(flags.rounds):  # in turns, so that a disturbance meets both
            for ranks in speeds:
                job = f"ranks_{ranks}_round_{turn}"
                speeds[ranks].append(measure(folder, [*words, "--print_steps", "1", "--job_name", job], ranks, job))
    print(f"{'ranks':>6} {'threads each':>13} {'tokens/s, median':>17} {'each run':>10}")
    cores = len(os.sched_getaffinity(0))
    for ranks, found in speeds.items():
        each = ", ".join(f"{speed:,.0f}" for speed in found)
        print(f"{ranks:>6} {max(1, cores // ranks):>13} {statistics.median(found):>17,.0f}   {each}")
    ratio = statistics.median(speeds[2]) / statistics.median(speeds[1])
    print(json.dumps({"two_ranks_over_one": round(ratio, 4), "tokens_per_second": speeds, **vars(flags)}))
    return 0


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

"""The cost of checkpoints: seconds that training pauses for one, and seconds to resume from it.

BERT-base at ZeRO stage 1 by default; with several hidden sizes, how the cost grows with the number of parameters.
Prints a table and, as its last line, JSON of the last size: `seconds_blocked`, `seconds_behind` (the commit in the
background), `share_at_10_minutes`, `seconds_to_verify`, `seconds_to_load`, `megabytes`. BENCHMARK_CLOCK=cpu counts
processor time, which leaves out waiting for the disk.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed_train
from benchmarks.small_runs import write_run
from benchmarks.timing import clock
from common.console import console
from common.errors import run_command
from common.help import Parser, positive_int
from training import build as run
from training.checkpoints import folder as checkpoint_folder
from training.checkpoints import writer as checkpoint

SECONDS_BETWEEN_SAVES = 600.0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="saving.py", description=__doc__)
    parser.add_argument(
        "--hidden_size", type=positive_int, nargs="+", default=[768], metavar="H", help="one or more (default: 768)"
    )
    parser.add_argument("--layers", type=positive_int, default=12, metavar="N", help="(default: 12)")
    parser.add_argument("--saves", type=positive_int, default=4, metavar="N", help="checkpoints written (default: 4)")
    parser.add_argument("--stage", type=int, default=1, choices=[0, 1, 2, 3], help="ZeRO stage (default: 1)")
    return parser


class Stopwatch:
    """Records the seconds of each call of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def put_around(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                return original(*args, **options)
            finally:
                self.seconds.setdefault(name, []).append(clock() - began)

        setattr(owner, name, timed)

    def best(self, name: str) -> float:
        return min(self.seconds[name])


def measure(hidden_size: int, flags: argparse.Namespace, watch: Stopwatch) -> dict[str, float]:
    watch.seconds.clear()
    with tempfile.TemporaryDirectory() as scratch:
        words = write_run(
            Path(scratch), hidden_size, flags.layers, flags.stage,
            rows=64, width=32, predictions=5, vocab=30522, steps=99, batch=1,
        )  # fmt: skip
        words += ["--save_every_steps", "1"]
        deepspeed_train.main([*words, "--max_steps", str(flags.saves)])
        deepspeed_train.main([*words, "--max_steps", str(flags.saves + 1)])
        saved = Path(scratch) / "out" / "saved_models" / "benchmark"
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) / 1e6
    return {
        "seconds_blocked": watch.best("all_ranks_save"),
        "seconds_behind": watch.best("commit"),
        "share_at_10_minutes": watch.best("all_ranks_save") / SECONDS_BETWEEN_SAVES,
        "seconds_to_verify": watch.best("find_damage"),
        "seconds_to_load": watch.best("all_ranks_load_engine"),
        "megabytes": size,
    }


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    watch = Stopwatch()
    watch.put_around(checkpoint.CheckpointWriter, "all_ranks_save")
    watch.put_around(checkpoint.CheckpointWriter, "commit")
    watch.put_around(checkpoint_folder, "find_damage")
    watch.put_around(run, "all_ranks_load_engine")
    measured = {size: measure(size, flags, watch) for size in flags.hidden_size}
    figures = measured[flags.hidden_size[-1]]
    console.say(f"{'hidden size':24}" + "".join(f"{size:12}" for size in measured))
    for name in figures:
        console.say(f"{name:24}" + "".join(f"{each[name]:12.4f}" for each in measured.values()))
    console.say(json.dumps({name: round(value, 5) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    run_command(main)

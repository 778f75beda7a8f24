"""Planned against measured seconds of a step on this machine: one rank with all cores, and two that share them.

The planner's accelerator is this machine, measured at run time (`--gpus 1:here`). Prints a table and, as its last line,
JSON with the keys `one_rank_error` and `two_ranks_error`: planned over measured, minus 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scaling
from common.errors import run_command
from common.help import Parser, positive_int
from training.planning.accelerators import Cluster
from training.planning.inputs import measure_lengths, read_engine, read_model
from training.planning.measure import measure_here
from training.planning.memory import ZeroSettings
from training.planning.recommendation import Workspace
from training.planning.workload import PlannedModel


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="planned_step.py", description=__doc__)
    parser.add_argument("--hidden_size", type=positive_int, default=256, metavar="H", help="(default: 256)")
    parser.add_argument("--layers", type=positive_int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--batch", type=positive_int, default=64, metavar="ROWS", help="rows per step (default: 64)")
    parser.add_argument("--steps", type=positive_int, default=6, metavar="N", help="steps of a run (default: 6)")
    parser.add_argument("--rounds", type=positive_int, default=2, metavar="N", help="runs of each kind (default: 2)")
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2], help="ZeRO stage (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    errors = {}
    print(f"{'ranks':>6} {'planned s':>10} {'measured s':>11} {'error':>7}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = scaling.write_files(folder, flags)
        for ranks in (1, 2):
            speeds = [
                scaling.measure(folder, [*words, "--job_name", f"{ranks}_{turn}"], ranks, f"{ranks}_{turn}")
                for turn in range(flags.rounds)
            ]
            planned, tokens = plan_step(folder, ranks)
            measured = tokens / max(speeds)
            errors[ranks] = planned / measured - 1
            print(f"{ranks:>6} {planned:>10.3f} {measured:>11.3f} {errors[ranks]:>+7.1%}")
    result = {"one_rank_error": round(errors[1], 4), "two_ranks_error": round(errors[2], 4)}
    print(json.dumps({**result, **vars(flags)}))
    return 0


def plan_step(folder: Path, ranks: int) -> tuple[float, float]:
    """Seconds and tokens of a step, as planned for the files' own settings."""
    model = read_model(folder / "model.json", scaling.WIDTH)
    engine = read_engine(folder / "deepspeed.json", ranks)
    data = measure_lengths(folder, model.folders, scaling.WIDTH)
    cluster = Cluster(measure_here(model.config, ranks), ranks)
    assert engine.micro is not None
    workspace = Workspace(PlannedModel(model.config, data.lengths), engine, engine.precision)
    found = workspace.estimate(cluster, engine.micro, ZeroSettings.of(engine.content))
    return found.step_seconds, found.tokens_per_step


if __name__ == "__main__":
    run_command(main)

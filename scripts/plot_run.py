"""Draw the loss of one or several runs from their metrics.jsonl to a PNG."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from common.console import console
from common.errors import UserError, run_command
from training.arguments import Parser


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plot_run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, <output_dir>/runs/<job_name>"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the PNG to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for folder in flags.runs:
        draw(axes, folder)
    axes.set(xlabel="optimizer step", ylabel="masked-LM loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(flags.output, dpi=120)
    console.say(f"the loss was drawn to {flags.output}")
    return 0


def draw(axes: Any, folder: Path) -> None:
    rows = read_rows(folder / "metrics.jsonl")
    for kind, style in (("train", {"alpha": 0.7}), ("validation", {"marker": "o"})):
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            steps = [row["step"] for row in chosen]
            axes.plot(steps, [row["mlm_loss"] for row in chosen], label=f"{folder.name}, {kind}", **style)


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; expected a run's folder, <output_dir>/runs/<job_name>")
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    run_command(main)

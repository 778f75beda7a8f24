"""Plot one or more runs from their metrics.jsonl: a PNG, or an HTML page with a table of the latest metrics."""

import argparse
import html
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from common.console import console
from common.errors import Problems, UserError, run_command
from common.files import check_folder_to_write, write_atomically
from common.help import Parser
from training.metrics.reader import read_metrics

Rows = list[dict[str, Any]]
# key in metrics.jsonl → label of the axis; a PNG shows only the first
PANELS = {
    "mlm_loss": "masked-LM loss (nats)",
    "mlm_accuracy": "masked-LM accuracy",
    "nsp_accuracy": "next-sentence accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s, without padding",
}
# kind of line → the keys of its last line that the table shows
TABLE = {
    "train": ("step", "samples", "tokens", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "tokens_per_second"),
    "validation": ("step", "mlm_loss", "perplexity", "mlm_accuracy", "nsp_accuracy"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plot_run.py", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, <output_dir>/runs/<job_name>"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png or .html file to write")
    parser.add_argument(
        "--over", choices=["step", "samples"], default="step", help="horizontal axis (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    if flags.output.suffix not in (".png", ".html"):
        raise UserError(f"--output {flags.output}: expected a name that ends with .png or .html")
    runs = {name: read_rows(folder / "metrics.jsonl") for name, folder in name_runs(flags.runs).items()}
    check_output(flags.output)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    if flags.output.suffix == ".png":
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        draw(axes, runs, "mlm_loss", flags.over)
        figure.savefig(flags.output, dpi=120)
    else:
        write_atomically(flags.output, page(runs, flags.over))
    console.say(f"plot written to {flags.output}")
    return 0


def check_output(path: Path) -> None:
    problems = Problems()
    if path.is_dir():
        problems.add(f"--output {path}: is a folder. Give another name that ends with .png or .html.")
    else:
        check_folder_to_write(path.parent, "--output", problems)
    problems.raise_if_any()


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by the name of their folder, or by its path where several have the same name."""
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def draw(axes: Any, runs: dict[str, Rows], key: str, over: str) -> None:
    for number, (name, rows) in enumerate(runs.items()):
        for kind, style in (("train", {"alpha": 0.6}), ("validation", {"marker": "o", "linestyle": "--"})):
            chosen = [row for row in rows if row["kind"] == kind and isinstance(row.get(key), int | float)]
            if chosen:
                positions = [row.get(over, row["step"]) for row in chosen]
                values = [row[key] for row in chosen]
                axes.plot(positions, values, label=f"{name}, {kind}", color=f"C{number % 10}", **style)
    axes.set(xlabel="step" if over == "step" else "samples", ylabel=PANELS[key])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def page(runs: dict[str, Rows], over: str) -> str:
    """A self-contained HTML page: plots as SVG, and a table."""
    figure, grid = pyplot.subplots(3, 2, figsize=(14, 13), layout="constrained")
    for axes, key in zip(grid.flat, PANELS, strict=True):
        draw(axes, runs, key, over)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    title = html.escape(", ".join(runs))
    kinds = "".join(f"<th colspan='{len(keys)}'>last {kind} line</th>" for kind, keys in TABLE.items())
    head = "".join(f"<th>{key}</th>" for keys in TABLE.values() for key in keys)
    body = "".join(f"<tr><td>{html.escape(name)}</td>{latest_metrics(rows)}</tr>" for name, rows in runs.items())
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>body{{font-family:sans-serif;margin:2em}}td,th{{padding:.3em .8em;text-align:right}}"
        f"td:first-child{{text-align:left}}svg{{max-width:100%;height:auto}}</style></head>\n"
        f"<body><h1>{title}</h1>\n<table><tr><th></th>{kinds}</tr><tr><th>run</th>{head}</tr>{body}</table>\n"
        f"{svg[svg.index('<svg') :]}</body></html>\n"
    )


def latest_metrics(rows: Rows) -> str:
    """Table cells of the last training line and the last validation line; empty where there is no value."""
    last = {row["kind"]: row for row in rows}
    values = [last.get(kind, {}).get(key) for kind, keys in TABLE.items() for key in keys]
    return "".join(f"<td>{_format_number(value)}</td>" for value in values)


def _format_number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "" if value is None else html.escape(str(value))
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def read_rows(path: Path) -> Rows:
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path}: has no metrics yet. A run writes the first line after --print_steps steps.")
    return rows


if __name__ == "__main__":
    run_command(main)

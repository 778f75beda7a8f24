"""Draw one or several runs from their metrics.jsonl: a PNG, or an HTML page with a table of their last figures."""

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
# key in metrics.jsonl → the axis; the first is the one that a PNG shows
PANELS = {
    "mlm_loss": "masked-LM loss (nats)",
    "mlm_accuracy": "share of masks right",
    "nsp_accuracy": "share of pairs right",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "real tokens a second",
}
# What the table shows of each kind's last line.
TABLE = {
    "train": ("step", "samples", "tokens", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "tokens_per_second"),
    "validation": ("step", "mlm_loss", "perplexity", "mlm_accuracy", "nsp_accuracy"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plot_run.py", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, <output_dir>/runs/<job_name>"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .png or .html to write")
    parser.add_argument(
        "--over", choices=["step", "samples"], default="step", help="the horizontal axis (default: %(default)s)"
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
    console.say(f"the loss was drawn to {flags.output}")
    return 0


def check_output(path: Path) -> None:
    problems = Problems()
    if path.is_dir():
        problems.add(f"--output {path}: is a folder; give another name that ends with .png or .html")
    else:
        check_folder_to_write(path.parent, "--output", problems)
    problems.raise_if_any()


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by their folder's name, or by its path where names repeat."""
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def draw(axes: Any, runs: dict[str, Rows], key: str, over: str) -> None:
    for number, (name, rows) in enumerate(runs.items()):
        for kind, style in (("train", {"alpha": 0.6}), ("validation", {"marker": "o", "linestyle": "--"})):
            chosen = [row for row in rows if row["kind"] == kind and isinstance(row.get(key), int | float)]
            if chosen:
                places = [row.get(over, row["step"]) for row in chosen]
                values = [row[key] for row in chosen]
                axes.plot(places, values, label=f"{name}, {kind}", color=f"C{number % 10}", **style)
    axes.set(xlabel="optimizer step" if over == "step" else "rows seen", ylabel=PANELS[key])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def page(runs: dict[str, Rows], over: str) -> str:
    """One file with everything in it: pictures as SVG, and a table."""
    figure, grid = pyplot.subplots(3, 2, figsize=(14, 13), layout="constrained")
    for axes, key in zip(grid.flat, PANELS, strict=True):
        draw(axes, runs, key, over)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    title = html.escape(", ".join(runs))
    kinds = "".join(f"<th colspan='{len(keys)}'>last {kind} line</th>" for kind, keys in TABLE.items())
    head = "".join(f"<th>{key}</th>" for keys in TABLE.values() for key in keys)
    body = "".join(f"<tr><td>{html.escape(name)}</td>{last_figures(rows)}</tr>" for name, rows in runs.items())
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>body{{font-family:sans-serif;margin:2em}}td,th{{padding:.3em .8em;text-align:right}}"
        f"td:first-child{{text-align:left}}svg{{max-width:100%;height:auto}}</style></head>\n"
        f"<body><h1>{title}</h1>\n<table><tr><th></th>{kinds}</tr><tr><th>run</th>{head}</tr>{body}</table>\n"
        f"{svg[svg.index('<svg') :]}</body></html>\n"
    )


def last_figures(rows: Rows) -> str:
    """Table cells: those of the last training line, then those of the last validation; empty where there is none."""
    last = {row["kind"]: row for row in rows}
    return "".join(f"<td>{_number(last.get(kind, {}).get(key))}</td>" for kind, keys in TABLE.items() for key in keys)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "" if value is None else html.escape(str(value))
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def read_rows(path: Path) -> Rows:
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path}: holds no figures yet; a run writes its first after --print_steps steps")
    return rows


if __name__ == "__main__":
    run_command(main)

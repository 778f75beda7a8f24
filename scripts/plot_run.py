"""Plot one or more runs from their metrics.jsonl: a PNG, or an HTML page with a table of results."""

import argparse
import html
import io
import sys
from collections.abc import Callable, Sequence
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
from common.words import format_count
from training.metrics.reader import read_metrics

Rows = list[dict[str, Any]]
METRICS = "metrics.jsonl"
# key in metrics.jsonl → label of the axis; a PNG shows only the first
PANELS = {
    "mlm_loss": "masked-LM loss (nats)",
    "mlm_accuracy": "masked-LM accuracy",
    "nsp_accuracy": "next-sentence accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s, without padding",
}
# --over → label of the axis
AXES = {"step": "steps", "samples": "samples", "tokens": "real tokens", "hours": "hours of the run, without gaps"}
Format = Callable[[float], str]
_share, _loss, _whole = "{:.1%}".format, "{:.3f}".format, "{:,.0f}".format
# heading of the table's column → kind of line, key, format
COLUMNS: dict[str, tuple[str, str, Format]] = {
    "steps": ("train", "step", _whole),
    "tokens": ("train", "tokens", format_count),
    "hours": ("train", "hours", "{:.2f}".format),
    "tokens/s": ("train", "tokens_per_second", _whole),
    "training loss (MLM)": ("train", "mlm_loss", _loss),
    "training accuracy (MLM)": ("train", "mlm_accuracy", _share),
    "validated at step": ("validation", "step", _whole),
    "validation loss (MLM)": ("validation", "mlm_loss", _loss),
    "perplexity": ("validation", "perplexity", "{:.1f}".format),
    "validation accuracy (MLM)": ("validation", "mlm_accuracy", _share),
    "validation accuracy (sentences)": ("validation", "nsp_accuracy", _share),
    "lowest validation loss": ("lowest", "mlm_loss", _loss),
    "at step": ("lowest", "step", _whole),
}
STYLE = """
body { font-family: sans-serif; margin: 2em }
table { border-collapse: collapse; margin-bottom: 2em }
th, td { border-bottom: 1px solid #ccc; padding: .4em .8em; text-align: right; font-variant-numeric: tabular-nums }
th { background: #f3f3f3; vertical-align: bottom; max-width: 7em }
td:first-child, th:first-child { text-align: left; font-weight: bold }
svg { max-width: 100%; height: auto }
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plot_run.py", description=__doc__)
    runs = "folder of a run, <output_dir>/runs/<job_name>, or a folder of several, such as <output_dir>/runs"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png or .html file to write")
    parser.add_argument("--over", choices=list(AXES), default="step", help="horizontal axis (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    if flags.output.suffix not in (".png", ".html"):
        raise UserError(f"--output {flags.output}: expected a name that ends with .png or .html")
    runs = {name: read_rows(folder / METRICS) for name, folder in name_runs(find_runs(flags.runs)).items()}
    for name, rows in runs.items():
        if not any(flags.over in row for row in rows):
            raise UserError(
                f"--over {flags.over}: the run {name} has no such figure in its metrics.jsonl; expected one of a run "
                f"of this project. Pass --over step"
            )
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


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs that `folders` are or contain, each once."""
    found: dict[Path, None] = {}
    for folder in folders:
        inside = [] if (folder / METRICS).is_file() else sorted(path.parent for path in folder.rglob(METRICS))
        found.update(dict.fromkeys(inside or [folder]))  # read_rows() reports a folder without a run
    return list(found)


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by the name of their folder, or by its path where several have the same name."""
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def draw(axes: Any, runs: dict[str, Rows], key: str, over: str) -> None:
    for number, (name, rows) in enumerate(runs.items()):
        for kind, style in (("train", {"alpha": 0.6}), ("validation", {"marker": "o", "linestyle": "--"})):
            of_kind = [row for row in rows if row["kind"] == kind and over in row]
            points = [(row[over], row[key]) for row in of_kind if isinstance(row.get(key), int | float)]
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{name}, {kind}", color=f"C{number % 10}", **style)
    axes.set(xlabel=AXES[over], ylabel=PANELS[key])
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
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n{table(runs)}\n"
        f"{svg[svg.index('<svg') :]}</body></html>\n"
    )


def table(runs: dict[str, Rows]) -> str:
    """A row per run; columns for which no run has a figure are left out."""
    cells = {name: results(rows) for name, rows in runs.items()}
    shown = [column for column in COLUMNS if any(column in row for row in cells.values())]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ("run", *shown))
    lines = [[html.escape(name), *(row.get(column, "") for column in shown)] for name, row in cells.items()]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>\n" for line in lines)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>"


def results(rows: Rows) -> dict[str, str]:
    """The figures of a run by column: of its last training and validation, and of the lowest validation loss."""
    lines = {row["kind"]: row for row in rows}
    validations = [r for r in rows if r["kind"] == "validation" and isinstance(r.get("mlm_loss"), int | float)]
    if validations:
        lines["lowest"] = min(validations, key=lambda row: row["mlm_loss"])
    found = {}
    for column, (kind, key, show) in COLUMNS.items():
        value = lines.get(kind, {}).get(key)
        if isinstance(value, int | float):
            found[column] = show(value)
        elif value is not None:
            found[column] = html.escape(str(value))  # "nan"
    return found


def read_rows(path: Path) -> Rows:
    """The lines of a run, each with `hours`, and validations with the `tokens` of the training line before them."""
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path}: has no metrics yet. A run writes the first line after --print_steps steps.")
    known: dict[str, float] = {}  # the position of the last training line
    seconds = 0.0
    for row in rows:
        if row["kind"] == "train":
            if "seconds_per_step" in row and "window_steps" in row:
                pauses = sum(row.get(f"seconds_{pause}", 0.0) for pause in ("checkpoint", "validation", "probe"))
                seconds += row["seconds_per_step"] * row["window_steps"] + pauses
                known["hours"] = seconds / 3600
            if "tokens" in row:
                known["tokens"] = row["tokens"]
        row.update({key: value for key, value in known.items() if key not in row})
    return rows


if __name__ == "__main__":
    run_command(main)

"""Plots of a report: scores with seeds and intervals, and groups of minimal pairs."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.results import Json, find_result

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def write_plots(report: Json, output: Path) -> list[Path]:
    """Write the PNG files and return their paths."""
    written = [_plot_scores(report, output / "scores.png")]
    for task in report["tasks"]:
        groups = {
            model["name"]: entry["groups"]
            for model in report["models"]
            if (entry := find_result(task, model["name"])) is not None and entry.get("groups")
        }
        if groups:
            path = output / f"{task['name'].replace('/', '_')}_groups.png"
            written.append(_plot_groups(task, groups, path))
    return written


def _plot_scores(report: Json, path: Path) -> Path:
    tasks, names = report["tasks"], [model["name"] for model in report["models"]]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(tasks) * (1 + len(names))), layout="constrained")
    axes = figure.add_subplot()
    for row, task in enumerate(tasks):
        metric = task["metrics"][0]
        base = row * (1 + len(names))
        axes.plot([100 * task["majority"][metric]] * 2, [base - 0.4, base + len(names) - 0.6], color="black", lw=1.5)
        for place, name in enumerate(names):
            _draw_result(axes, task, name, metric, base + place, _COLOURS[place % len(_COLOURS)])
    axes.set_yticks(
        [row * (1 + len(names)) + (len(names) - 1) / 2 for row in range(len(tasks))],
        [f"{task['title']}\n{task['metrics'][0]}" for task in tasks],
    )
    axes.invert_yaxis()
    axes.set_xlabel("score × 100: seeds (dots), mean with 95 % interval, untrained (crosses), majority (black)")
    handles = [axes.plot([], [], "o", color=_COLOURS[i % len(_COLOURS)], label=name)[0] for i, name in enumerate(names)]
    axes.legend(handles=handles, loc="best")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def _draw_result(axes: Any, task: Json, name: str, metric: str, place: float, colour: str) -> None:
    entry, fresh = find_result(task, name), find_result(task, name, untrained=True)
    if entry is not None and "summary" in entry:
        summary = entry["summary"][metric]
        axes.plot([100 * summary["low"], 100 * summary["high"]], [place, place], color=colour, lw=2, alpha=0.5)
        axes.plot([100 * value for value in entry["values"][metric]], [place] * len(entry["seeds"]), ".", color=colour)
        axes.plot(100 * summary["mean"], place, "o", color=colour)
    if fresh is not None and "summary" in fresh:
        axes.plot(100 * fresh["summary"][metric]["mean"], place, "x", color=colour)


def _plot_groups(task: Json, groups: dict[str, dict[str, float]], path: Path) -> Path:
    first = next(iter(groups.values()))
    order = sorted(first, key=lambda name: first[name])
    figure = Figure(figsize=(8, 1 + 0.17 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    for number, (model, values) in enumerate(groups.items()):
        points = [100 * values[name] for name in order]
        axes.plot(points, range(len(order)), "o", ms=4, color=_COLOURS[number % len(_COLOURS)], label=model)
    axes.axvline(50, color="black", lw=1)
    axes.set_yticks(range(len(order)), order, fontsize=6)
    axes.set_xlabel(f"{task['title']}: pairs of which the good sentence is preferred, %; line: chance")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path

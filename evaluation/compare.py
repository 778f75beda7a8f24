"""Compare two models side by side, with a paired test on the rows that both were scored on.

python -m evaluation.compare OUT                    the two models of one run
python -m evaluation.compare OUT:ours OUT:bert      two models of a run, by name
python -m evaluation.compare OUT1 OUT2              two runs of one model each
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common.console import console
from common.errors import Problems, UserError, nearest, run_command
from common.files import write_atomically
from common.help import Parser
from common.words import counted, markdown_table
from evaluation.results import REPORT, Json, find_result
from evaluation.tasks.task import make_task


@dataclass(frozen=True)
class Side:
    """One model of one run."""

    folder: Path
    report: Json
    model: str

    @property
    def name(self) -> str:
        return f"{self.folder}:{self.model}"


class Line(NamedTuple):
    task: str
    metric: str
    num_rows: int
    num_seeds: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    corrected: float


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m evaluation.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN[:MODEL]", help="output folders of evaluation.run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as JSON too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    first, second = open_sides(flags.runs)
    lines, notes = compare_sides(first, second)
    for note in notes:
        console.warn(note)
    if not lines:
        raise UserError(
            "the two have no task in common that was scored on the same rows. Evaluate both with --tasks alike."
        )
    console.say(table(first, second, lines))
    if flags.output is not None:
        content = {"first": first.name, "second": second.name, "lines": [line._asdict() for line in lines]}
        write_atomically(flags.output, json.dumps(content, indent=1) + "\n")
    return 0


def open_sides(words: Sequence[str]) -> tuple[Side, Side]:
    if len(words) > 2:
        raise UserError(f"{len(words)} runs were given, expected one or two. See --help.")
    problems = Problems()
    opened = [problems.attempt(partial(_open, word)) for word in words]
    problems.raise_if_any()
    choices = [choice for choice in opened if choice is not None]
    if len(choices) == 1:
        folder, report, names = choices[0]
        if len(names) != 2:
            found = f"{counted(len(names), 'model')} ({', '.join(names)})"
            raise UserError(f"{folder}: has {found}, expected two. Name a second run.")
        return Side(folder, report, names[0]), Side(folder, report, names[1])
    sides = []
    for folder, report, names in choices:
        if len(names) != 1:
            raise UserError(f"{folder}: has {len(names)} models. Name one: {folder}:{names[0]}.")
        sides.append(Side(folder, report, names[0]))
    return sides[0], sides[1]


def _open(word: str) -> tuple[Path, Json, list[str]]:
    """RUN or RUN:MODEL → the folder, its report, and the models that are meant."""
    path, _, name = (word, "", "") if Path(word).is_dir() else word.rpartition(":")
    folder = Path(path)
    try:
        report = json.loads((folder / REPORT).read_text())
        names = [model["name"] for model in report["models"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{word}: has no report.json that can be read ({error}). Expected an output folder of evaluation.run, or "
            "FOLDER:MODEL."
        ) from None
    if name and name not in names:
        raise UserError(f"{word}: the run has no model {name!r}{nearest(name, names)} (found {', '.join(names)}).")
    return folder, report, [name] if name else names


def compare_sides(first: Side, second: Side) -> tuple[list[Line], list[str]]:
    """One line per task and metric, and notes about what could not be compared."""
    from evaluation.scoring.significance import compare, holm  # scipy and scikit-learn take a second to import

    others = {task["name"]: task for task in second.report["tasks"]}
    lines, notes = [], []
    if first.report["protocol"]["name"] != second.report["protocol"]["name"]:
        names = [side.report["protocol"]["name"] for side in (first, second)]
        notes.append(f"the runs follow different protocols ({names[0]} and {names[1]})")
    for task in first.report["tasks"]:
        seeds = _shared_seeds(first, task, second, others.get(task["name"]))
        if isinstance(seeds, str):
            notes.append(f"{task['title']}: not compared, because {seeds}")
            continue
        for metric in task["metrics"]:
            (a, value_a), (b, value_b) = (_parts(side, task, metric, seeds) for side in (first, second))
            compared = compare(_metric(first, task, metric), a, b)
            lines.append(
                Line(task["title"], metric, task["num_rows"], len(seeds), value_a, value_b, *compared, corrected=1.0)
            )
    corrected = holm([line.p_value for line in lines])
    return [line._replace(corrected=p) for line, p in zip(lines, corrected, strict=True)], notes


def _shared_seeds(first: Side, task: Json, second: Side, other: Json | None) -> list[int] | str:
    """The seeds that both have results of, or why the two cannot be compared."""
    if other is None:
        return f"{second.name} was not evaluated on it"
    if task["dev_digest"] != other["dev_digest"]:
        return "the two were scored on different rows"
    seeds: list[list[int]] = []
    for side, entry in ((first, task), (second, other)):
        result = find_result(entry, side.model)
        if result is None or "unavailable" in result:
            return f"{side.name} has no score"
        seeds.append(result["seeds"])
    if task["kind"] in ("minimal_pairs", "cloze"):  # nothing was drawn
        return seeds[0][:1]
    return sorted({*seeds[0]} & {*seeds[1]}) or "they share no seed"


def _gold(side: Side, task: Json) -> Json:
    path = side.folder / "gold" / f"{task['task']}.json"
    try:
        content: Json = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}). Run evaluation.run again; it keeps what is finished."
        ) from None
    return content


def _metric(side: Side, task: Json, name: str) -> Any:
    from evaluation.scoring.scores import metrics_of

    gold = _gold(side, task)
    return metrics_of(make_task(gold["task"], task["task"]), gold["num_labels"])[name]


def _parts(side: Side, task: Json, metric_name: str, seeds: Sequence[int]) -> tuple[list[Any], float]:
    """Per-row numbers of the metric for each seed, and its mean over these seeds."""
    own = next(item for item in side.report["tasks"] if item["name"] == task["name"])
    entry = find_result(own, side.model)
    assert entry is not None
    gold, metric = _gold(side, own)["gold"][own["split"]], _metric(side, own, metric_name)
    places = [entry["seeds"].index(seed) for seed in seeds] if len(entry["seeds"]) > 1 else [0]
    parts = []
    for place in places:
        path = side.folder / entry["cells"][place]
        try:
            predictions = json.loads(path.read_text())["result"]["predictions"][own["split"]]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}). Run evaluation.run again; it redoes this cell."
            ) from None
        parts.append(metric.parts(gold, predictions))
    return parts, fmean(entry["values"][metric_name][place] for place in places)


def table(first: Side, second: Side, lines: Sequence[Line]) -> str:
    header = ["task", "metric", "n", "seeds", "A", "B", "B − A [95 % interval]", "p", "p, corrected"]
    rows = [
        (
            *(line.task, line.metric, f"{line.num_rows:,}", line.num_seeds),
            *(f"{100 * line.first:.1f}", f"{100 * line.second:.1f}"),
            f"{100 * line.difference:+.1f} [{100 * line.low:+.1f}, {100 * line.high:+.1f}]",
            *(f"{line.p_value:.4f}", f"{line.corrected:.4f}"),
        )
        for line in lines
    ]
    explanation = (
        "p: paired permutation test over rows, two-sided; corrected for the number of lines (Holm). The interval is a "
        "paired bootstrap over rows. Neither covers seeds that were not run."
    )
    sides = [f"A: {first.name}", f"B: {second.name}"]
    return "\n".join([*sides, "", *markdown_table(header, rows), "", explanation])


if __name__ == "__main__":
    run_command(main)

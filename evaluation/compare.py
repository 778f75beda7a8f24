"""Compare two models side by side, with a paired test on the rows that both were scored on.

python -m evaluation.compare OUT                    the two models of one run
python -m evaluation.compare OUT:ours OUT:bert      two models of a run, by name
python -m evaluation.compare OUT1 OUT2              two runs of one model each
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

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
        content = {"first": first.name, "second": second.name, "lines": lines}
        write_atomically(flags.output, json.dumps(content, indent=1) + "\n")
    return 0


def open_sides(words: Sequence[str]) -> tuple[Side, Side]:
    if len(words) > 2:
        raise UserError(f"{len(words)} runs were given, expected one or two. See --help.")
    problems = Problems()
    opened = [problems.attempt(partial(_open, word)) or [] for word in words]
    problems.raise_if_any()
    expected = 3 - len(words)  # models of each run
    for word, sides in zip(words, opened, strict=True):
        if len(sides) != expected:
            found = f"{counted(len(sides), 'model')} ({', '.join(side.model for side in sides)})"
            remedy = f"Name one of them: {word}:MODEL." if expected == 1 else "Name a second run."
            raise UserError(f"{word}: has {found}, expected {expected}. {remedy}")
    first, second = (side for sides in opened for side in sides)
    return first, second


def _open(word: str) -> list[Side]:
    """The models that RUN or RUN:MODEL means."""
    path, _, name = (word, "", "") if Path(word).is_dir() or ":" not in word else word.rpartition(":")
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{word}: no such folder. Expected an output folder of evaluation.run, or FOLDER:MODEL.")
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
    return [Side(folder, report, model) for model in ([name] if name else names)]


def compare_sides(first: Side, second: Side) -> tuple[list[Json], list[str]]:
    """One line per task and metric, and notes about what could not be compared."""
    from evaluation.scoring.scores import metrics_of  # scipy takes a second to import
    from evaluation.scoring.significance import compare, holm

    others = {task["name"]: task for task in second.report["tasks"]}
    lines, notes = [], []
    protocols = [side.report["protocol"]["name"] for side in (first, second)]
    if protocols[0] != protocols[1]:
        notes.append(f"the runs follow different protocols ({protocols[0]} and {protocols[1]})")
    for task in first.report["tasks"]:
        seeds = _shared_seeds(first, task, second, others.get(task["name"]))
        if isinstance(seeds, str):
            notes.append(f"{task['title']}: not compared, because {seeds}")
            continue
        gold = _read(first.folder / "gold" / f"{task['task']}.json", "it keeps what is finished")
        metrics = metrics_of(make_task(gold["task"], task["task"]), gold["num_labels"])
        found = [_predictions(first, task, seeds), _predictions(second, others[task["name"]], seeds)]
        for metric in (metrics[name] for name in task["metrics"]):
            a, b = ([metric.parts(gold["gold"][task["split"]], one) for one in predictions] for predictions in found)
            means = [fmean(float(metric.of_sums(part.sum(0))) for part in parts) for parts in (a, b)]
            line = {"task": task["title"], "metric": metric.name, "num_rows": task["num_rows"], "num_seeds": len(seeds)}
            lines.append(line | {"first": means[0], "second": means[1], **compare(metric, a, b)._asdict()})
    corrected = holm([line["p_value"] for line in lines])
    return [line | {"corrected": p} for line, p in zip(lines, corrected, strict=True)], notes


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


def _predictions(side: Side, task: Json, seeds: Sequence[int]) -> list[Any]:
    """What the model predicted with each seed."""
    entry = find_result(task, side.model)
    assert entry is not None
    places = [entry["seeds"].index(seed) for seed in seeds] if len(entry["seeds"]) > 1 else [0]
    keys = ("result", "predictions", task["split"])
    return [_read(side.folder / entry["cells"][place], "it redoes this cell", *keys) for place in places]


def _read(path: Path, remedy: str, *keys: str) -> Any:
    """The content of a JSON file, or what is below `keys` in it."""
    try:
        return reduce(getitem, keys, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Run evaluation.run again; {remedy}.") from None


def table(first: Side, second: Side, lines: Sequence[Json]) -> str:
    header = ["task", "metric", "n", "seeds", "A", "B", "B − A [95 % interval]", "p", "p, corrected"]
    rows = [
        (
            *(line["task"], line["metric"], f"{line['num_rows']:,}", line["num_seeds"]),
            *(f"{100 * line['first']:.1f}", f"{100 * line['second']:.1f}"),
            f"{100 * line['difference']:+.1f} [{100 * line['low']:+.1f}, {100 * line['high']:+.1f}]",
            *(f"{line['p_value']:.4f}", f"{line['corrected']:.4f}"),
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

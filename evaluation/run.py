"""Evaluate encoders: fine-tune them on labelled tasks, score minimal pairs, and write a report.

    python -m evaluation.run --model DIR --tasks small blimp --data DATA --output OUT
    python -m evaluation.run --model ours=DIR1 bert=DIR2 --tasks reviews.csv --text text --label stars --output OUT

Run the same command again to resume after an interruption.
"""

import argparse
import math
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.console import console
from common.errors import Problems, UserError, nearest, run_command
from common.files import check_folder_to_write
from common.hardware import choose_accelerator
from common.help import HelpFormatter, Parser, positive_float, positive_int, share, whole_number
from common.json_files import load_json
from common.processes import STOPPED_EXIT_CODE, handle_stop_signals
from common.words import counted
from evaluation.tasks.task import GROUPS, TABLES, TASK_FOLDER, Task, choose_tasks, load_task, shipped_tasks
from evaluation.tasks.task_data import TaskData, check_metrics_defined, fixed_order, load_all, selection_split

if TYPE_CHECKING:
    from evaluation.finetuning.finetune import Machine
    from evaluation.runner import Plan

RATES, BATCHES = (2e-5, 5e-5, 1e-4), (16, 32)


class _Stopped(KeyboardInterrupt):
    """A stop signal came; its name is the text."""


class _Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def build_parser() -> Parser:
    parser = Parser(prog="python -m evaluation.run", description=__doc__, formatter_class=_Formatter)
    tasks = (
        f"groups ({', '.join(GROUPS)}), shipped tasks ({', '.join(shipped_tasks())}), task files (.json), or labelled "
        f"tables ({', '.join(TABLES)})"
    )
    masking = "of minimal pairs: mask each token in turn, each whole word, or a token and those after it in its word"
    add = parser.add_argument_group("what is evaluated").add_argument
    add("--model", nargs="+", required=True, metavar="[NAME=]DIR", help="Hugging Face folders")
    add("--tasks", nargs="+", required=True, metavar="TASK", help=tasks)
    add("--data", type=Path, metavar="DIR", help="folder that holds the data of the tasks")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for cells and reports")
    add("--text", metavar="COLUMN", help="column of the text in labelled tables")
    add("--text_pair", metavar="COLUMN", help="column of a second text in labelled tables")
    add("--label", metavar="COLUMN", help="column of the label in labelled tables")
    add("--max_train_rows", type=positive_int, metavar="N", help="train on N rows of each task, for a trial")
    add("--max_dev_rows", type=positive_int, metavar="N", help="score on N rows of each split, for a trial")
    add = parser.add_argument_group("protocol").add_argument
    add("--protocol", choices=("fixed", "sweep", "transfer"), default="fixed", help="see docs/evaluation.md")
    add("--seeds", type=positive_int, default=3, metavar="N", help="runs of each fine-tuning")
    add("--first_seed", type=whole_number, default=1, metavar="N", help="seeds are N, N + 1, …")
    add("--untrained_seeds", type=whole_number, default=1, metavar="N", help="runs of the same architecture untrained")
    add("--learning_rate", type=positive_float, default=5e-5, metavar="LR", help="peak learning rate")
    add("--batch_size", type=positive_int, default=32, metavar="N", help="rows per step, over all ranks")
    add("--epochs", type=positive_float, default=3.0, metavar="N", help="passes over the training rows")
    add("--warmup", type=share, default=0.1, metavar="SHARE", help="share of the steps with a rising rate")
    add("--weight_decay", type=share, default=0.01, metavar="W", help="weight decay of AdamW")
    add("--sweep_learning_rates", type=positive_float, nargs="+", default=RATES, metavar="LR", help="for sweep")
    add("--sweep_batch_sizes", type=positive_int, nargs="+", default=BATCHES, metavar="N", help="for sweep")
    add("--masking", choices=("token", "word", "word_l2r"), default="token", help=masking)
    add = parser.add_argument_group("execution").add_argument
    add("--scorer", choices=("auto", "packed", "stock"), default="auto", help="for zero-shot tasks")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of fine-tuning")
    add("--micro_batch_size", type=positive_int, metavar="N", help="rows per device and forward pass")
    add("--keep_models", action="store_true", help="save the fine-tuned models below OUTPUT/models")
    add("--deepspeed_config", type=Path, metavar="FILE", help="DeepSpeed JSON, for the deepspeed launcher")
    add("--dry_run", action="store_true", help="check everything and show what would be computed; write nothing")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the launcher passes it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    from evaluation.finetuning import ranks  # slow to import; --help and typos do not need it

    choose_accelerator()  # transformers imports DeepSpeed if it is installed
    console.enable(ranks.is_first())
    plan, machine = _make_plan(flags)
    if flags.dry_run:
        _show_plan(plan, num_models=len(flags.model))
        return 0
    _join_ranks(machine.deepspeed)
    words = sys.argv[1:] if argv is None else argv
    words = [word for word in words if not word.startswith("--local_rank=")]  # the launcher's
    command = shlex.join(["python", "-m", "evaluation.run", *words])
    return _all_ranks_evaluate(plan, machine, flags.output, command)


def _make_plan(flags: argparse.Namespace) -> tuple["Plan", "Machine"]:
    """What the flags ask for, with all rows read; one UserError lists all that is wrong."""
    problems = Problems()
    columns = {"text": flags.text, "text_pair": flags.text_pair, "label": flags.label}
    tasks = problems.attempt(lambda: _choose(flags.tasks, columns, flags.protocol))
    check_folder_to_write(flags.output, "--output", problems)
    config, deepspeed = flags.deepspeed_config, None
    if config is not None:
        deepspeed = problems.attempt(lambda: load_json(config, "a DeepSpeed JSON (--deepspeed_config)"))
    data = problems.attempt(lambda: load_all(tasks, flags.data)) if tasks else None

    from evaluation.finetuning import ranks
    from evaluation.finetuning.finetune import Machine, Setting, deepspeed_settings, quiet_libraries
    from evaluation.finetuning.models import open_models
    from evaluation.pseudo_likelihood.native import prepare_process
    from evaluation.runner import Plan

    quiet_libraries()
    prepare_process()
    models = problems.attempt(lambda: open_models(_named_paths(flags.model, must_exist=not flags.dry_run)))
    setting = Setting(**{field.name: getattr(flags, field.name) for field in fields(Setting)})
    swept = product(flags.sweep_batch_sizes, flags.sweep_learning_rates) if flags.protocol == "sweep" else ()
    candidates = [replace(setting, learning_rate=rate, batch_size=size) for size, rate in swept] or [setting]
    machine = Machine(ranks.num_ranks(), flags.micro_batch_size, deepspeed_settings(deepspeed) if deepspeed else None)
    for candidate in candidates:
        problems.attempt(partial(machine.spread, candidate.batch_size))
    problems.raise_if_any()
    assert models is not None
    assert data is not None
    data = [_limited(item, flags.max_train_rows, flags.max_dev_rows) for item in data]
    for item in data:
        problems.attempt(partial(_check_computable, item, models, flags.protocol))
    problems.raise_if_any()
    plan = Plan(
        models,
        data,
        seeds=range(flags.first_seed, flags.first_seed + flags.seeds),
        untrained_seeds=range(flags.first_seed, flags.first_seed + flags.untrained_seeds),
        setting=setting,
        candidates=candidates,
        **{name: getattr(flags, name) for name in ("protocol", "masking", "scorer", "keep_models")},
    )
    return plan, machine


def _all_ranks_evaluate(plan: "Plan", machine: "Machine", output: Path, command: str) -> int:
    from evaluation.cells import CellStore
    from evaluation.finetuning import ranks
    from evaluation.plots import write_plots
    from evaluation.report import make_report, write_reports
    from evaluation.results import markdown
    from evaluation.runner import Runner

    store = CellStore(output)
    runner = Runner(plan, store, machine)
    try:
        with handle_stop_signals(_raise_stopped):
            results = runner.all_ranks_run()
    except _Stopped as stopped:
        finished = counted(runner.num_computed + runner.num_resumed, "finished cell")
        console.warn(f"stopped by {stopped}: {finished} below {store.root}. Run the same command again to resume")
        return STOPPED_EXIT_CODE
    if store.num_damaged:
        console.warn(f"{counted(store.num_damaged, 'damaged or half-written cell')} below {store.root}, computed again")
    if all("unavailable" in result.results[0] for result in results):
        raise UserError(f"no model can do any of the tasks: {results[0].results[0]['unavailable']}. See --help.")
    if not ranks.is_first():
        return 0
    report = make_report(plan, results, store, command)
    write_reports(report, plan.tasks, output)
    write_plots(report, output)
    console.say(markdown(report | {"warnings": []}))
    for text in report["warnings"]:
        console.warn(text)
    console.say(
        f"{counted(runner.num_computed, 'cell')} computed, {runner.num_resumed} kept from before. "
        f"{output / 'report.md'}, report.json, scores.png and a section for the model card are written."
    )
    return 0


def _raise_stopped(number: int, _frame: Any) -> None:
    raise _Stopped(signal.Signals(number).name)


def _show_plan(plan: "Plan", num_models: int) -> None:
    """Show the cells of a run, and the steps and rows of each. Some of the models may not exist yet."""
    setting = plan.setting
    console.say("dry run: nothing was computed")
    for item in plan.tasks:
        num_dev = sum(map(len, item.dev.values()))
        if item.task.is_zero_shot:
            work = f"{counted(num_dev, 'row')} scored without training"
        else:
            steps = math.ceil(math.ceil(len(item.train) / setting.batch_size) * setting.epochs)
            work = f"{counted(steps, 'step')} of {counted(setting.batch_size, 'row')}, then "
            work += f"{counted(num_dev, 'row')} scored"
        cells = num_models * plan.num_cells(item)
        console.say(f"  {item.task.name}: {counted(cells, 'cell')}, each {work}")


def _choose(words: Sequence[str], columns: Mapping[str, str | None], protocol: str) -> list[Task]:
    tasks = choose_tasks(words, columns)
    if protocol == "transfer":
        missing = {task.starts_from for task in tasks if task.starts_from} - {task.name for task in tasks}
        for name in sorted(missing & set(shipped_tasks())):
            tasks.append(load_task(TASK_FOLDER / f"{name}.json"))
            console.say(f"--protocol transfer: task {name} is added, because others start from its model")
        _check_starts(tasks)
        if not any(task.starts_from for task in tasks):
            raise UserError('--protocol transfer: none of the tasks has "starts_from". Use --protocol fixed.')
    return tasks


def _check_starts(tasks: Sequence[Task]) -> None:
    """Refuse tasks that start from one that is not among them, and tasks that start from each other."""
    names = [task.name for task in tasks]
    starts = {task.name: task.starts_from for task in tasks if task.starts_from is not None}
    for name, source in starts.items():
        if source not in names:
            raise UserError(
                f'task {name}: "starts_from" names {source!r}, which is not among the tasks'
                f"{nearest(source, names, '.')} Add it to --tasks, or correct the name."
            )
    try:
        TopologicalSorter({name: [source] for name, source in starts.items()}).prepare()
    except CycleError as error:
        name = error.args[1][0]
        raise UserError(
            f'task {name}: "starts_from" leads back to {name!r}. Remove it from one of the tasks.'
        ) from None


def _named_paths(words: Sequence[str], must_exist: bool) -> list[tuple[str | None, Path]]:
    """[NAME=]DIR; a folder that has "=" in its own name is taken as it is.

    In a dry run a folder may be missing: scripts/pretrain.py exports a model after it.
    """
    named = []
    for word in words:
        name, _, folder = ("", "", word) if "=" not in word or Path(word).exists() else word.partition("=")
        if must_exist or Path(folder).exists():
            named.append((name or None, Path(folder)))
        else:
            console.warn(f"--model {folder}: does not exist yet and is not checked")
    return named


def _check_computable(data: TaskData, models: Sequence[Any], protocol: str) -> None:
    """What would otherwise end the run after other cells were computed."""
    from evaluation.pseudo_likelihood.minimal_pairs import fill_gap

    check_metrics_defined(data.task, data.dev, data.labels)
    if protocol == "sweep" and not data.task.is_zero_shot:
        selection_split(data)
    if data.task.kind == "cloze":
        for model, split in product(models, data.dev):
            try:
                for row in data.dev[split]:
                    fill_gap(model.tokenizer, row, model.max_positions)
            except UserError as error:
                raise UserError(f"task {data.task.name}, {split}, {error}") from None


def _limited(data: TaskData, max_train: int | None, max_dev: int | None) -> TaskData:
    """The same random rows for every run with the same limits."""

    def some(rows: list[Any], limit: int | None) -> list[Any]:
        if limit is None or len(rows) <= limit:
            return rows
        return [rows[i] for i in sorted(fixed_order(rows, None)[:limit])]

    limited = replace(data, train=some(data.train, max_train), dev={k: some(v, max_dev) for k, v in data.dev.items()})
    if (limited.train, limited.dev) == (data.train, data.dev):
        return data
    sizes = [f"{len(limited.train):,} of {len(data.train):,} rows to train on"]
    sizes += [f"{len(limited.dev[split]):,} of {len(rows):,} of {split}" for split, rows in data.dev.items()]
    note = f"{data.task.name}: a trial on a part of the data ({', '.join(sizes)}); not comparable with published scores"
    return replace(limited, notes=(*data.notes, note))


def _join_ranks(deepspeed: dict[str, Any] | None) -> None:
    """Start the process group of a launched run, by the stock Trainer's own arguments."""
    from evaluation.finetuning import ranks

    if ranks.num_ranks() > 1:
        import torch
        from transformers import TrainingArguments

        arguments = TrainingArguments(
            output_dir="unused", use_cpu=not torch.cuda.is_available(), report_to="none", deepspeed=deepspeed
        )
        assert arguments.world_size == ranks.num_ranks()


if __name__ == "__main__":
    run_command(main)

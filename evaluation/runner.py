"""Protocols: which cells a run consists of, and getting each of them done once."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from common.console import console
from evaluation.cells import Cell, CellStore, Result
from evaluation.finetuning import ranks
from evaluation.finetuning.finetune import Machine, Setting, all_ranks_fine_tune
from evaluation.finetuning.models import ModelFolder, Unavailable
from evaluation.pseudo_likelihood.likelihood import Masking
from evaluation.scoring.scores import collapse_reason, score
from evaluation.tasks.task_data import TaskData, selection_split
from evaluation.zero_shot import all_ranks_score_zero_shot

Protocol = Literal["fixed", "sweep", "transfer"]
PROTOCOLS: dict[Protocol, str] = {
    "fixed": "one setting for all tasks, fixed in advance; the evaluation files are scored once per seed",
    "sweep": "learning rate and batch size chosen per model and task on rows held out of train; the evaluation files "
    "are scored once per seed, with the chosen setting and the whole training file",
    "transfer": "as fixed, but tasks that name a task to start from are fine-tuned from its model of the same seed",
}


@dataclass(frozen=True)
class Plan:
    models: Sequence[ModelFolder]
    tasks: Sequence[TaskData]
    seeds: Sequence[int]
    untrained_seeds: Sequence[int]
    protocol: Protocol
    setting: Setting
    candidates: Sequence[Setting]  # of sweep, from which one is chosen; else the setting alone
    masking: Masking
    scorer: str
    keep_models: bool

    def num_cells(self, data: TaskData) -> int:
        """How many cells a task has for each model."""
        if data.task.is_zero_shot:  # nothing is drawn for a trained model
            return 1 + len(self.untrained_seeds)
        num_choices = len(self.candidates)
        return len(self.seeds) + len(self.untrained_seeds) + (num_choices if num_choices > 1 else 0)

    def starts(self) -> dict[str, str]:
        """Under "transfer": task → the task whose model it starts from."""
        tasks = [data.task for data in self.tasks if self.protocol == "transfer"]
        return {task.name: task.starts_from for task in tasks if task.starts_from is not None}


@dataclass(frozen=True)
class TaskResult:
    """All seeds of one model on one task."""

    model: ModelFolder
    data: TaskData
    untrained: bool
    setting: Setting | None  # None: zero-shot
    cells: list[Cell]
    results: list[Result]
    selection: list[dict[str, Any]]  # of sweep: every setting with its held-out score


class ProgressLine:
    """One line over all cells, with the time that is left."""

    def __init__(self, total: float) -> None:
        self.bar = console.progress(
            total=total,
            in_lines=True,
            smoothing=0.0,
            bar_format="{percentage:3.0f}% |{bar:20}| {elapsed}, ETA {remaining}: {desc}",
        )
        self.share = self.cost = 0.0

    def begin(self, cell: Cell) -> None:
        self.share, self.cost = 0.0, cell.cost
        self.bar.set_description_str(cell.description, refresh=False)

    def advance(self, share: float) -> None:
        if share > self.share:
            gain = self.cost * (share - self.share)
            self.bar.total = max(self.bar.total, self.bar.n + gain)
            self.bar.update(gain)
            self.share = share

    def leave_out(self, cost: float) -> None:
        """A cell that was finished before takes no time, and must not make the others look fast."""
        self.bar.total = max(self.bar.total - cost, self.bar.n)


class Runner:
    def __init__(self, plan: Plan, store: CellStore, machine: Machine) -> None:
        self.plan, self.store, self.machine = plan, store, machine
        self.starts = plan.starts()
        self.done: dict[str, Result] = {}
        self.num_computed = self.num_resumed = 0
        self.progress = ProgressLine(
            sum(
                plan.num_cells(data) * Cell(model, data, 0, None if data.task.is_zero_shot else plan.setting).cost
                for data in plan.tasks
                for model in plan.models
            )
        )

    def all_ranks_run(self) -> list[TaskResult]:
        try:
            return [
                self._all_ranks_run_task(model, data, untrained, seeds)
                # Tasks that others start from come first.
                for data in sorted(self.plan.tasks, key=lambda data: data.task.name not in self.starts.values())
                for untrained, seeds in ((False, self.plan.seeds), (True, self.plan.untrained_seeds))
                for model in self.plan.models
                if seeds
            ]
        finally:
            self.progress.bar.close()

    def _all_ranks_run_task(
        self, model: ModelFolder, data: TaskData, untrained: bool, seeds: Sequence[int]
    ) -> TaskResult:
        setting: Setting | None = None
        selection: list[dict[str, Any]] = []
        if not data.task.is_zero_shot:
            setting, selection = self._all_ranks_choose_setting(model, data)
        elif not untrained:
            seeds = seeds[:1]  # nothing is drawn for a trained model
        cells = [self._cell(model, data, seed, setting, untrained) for seed in seeds]
        results = [self.all_ranks_obtain(cell) for cell in cells]
        return TaskResult(model, data, untrained, setting, cells, results, selection)

    def _cell(self, model: ModelFolder, data: TaskData, seed: int, setting: Setting | None, untrained: bool) -> Cell:
        if setting is None:
            return Cell(model, data, seed, None, untrained, scoring=f"{self.plan.masking},{self.plan.scorer}")
        name = data.task.name
        keeps = name in self.starts.values() or (self.plan.keep_models and not untrained)
        start = None
        if name in self.starts:
            source = next(item for item in self.plan.tasks if item.task.name == self.starts[name])
            start = self._cell(model, source, seed, setting, untrained)
        return Cell(model, data, seed, setting, untrained, start=start, keeps_model=keeps)

    def _all_ranks_choose_setting(self, model: ModelFolder, data: TaskData) -> tuple[Setting, list[dict[str, Any]]]:
        """The setting with the best score on rows held out of train, with the first seed; the first of equals."""
        candidates = self.plan.candidates
        if len(candidates) == 1:
            return candidates[0], []
        reduced, tried = selection_split(data), []
        for setting in candidates:
            cell = Cell(model, reduced, self.plan.seeds[0], setting, purpose="select")
            value = self.all_ranks_obtain(cell)["scores"]["selection"][data.task.main_metric]
            tried.append({"setting": asdict(setting), "score": value})
        best = max(range(len(candidates)), key=lambda i: tried[i]["score"])
        return candidates[best], tried

    def all_ranks_obtain(self, cell: Cell) -> Result:
        """A cell's result: of this run, of an earlier one, or computed now."""
        if cell.key in self.done:
            self.progress.leave_out(cell.cost)
            return self.done[cell.key]
        result = ranks.all_ranks_take_from_first(lambda: self.store.read(cell))
        if result is not None:
            self.num_resumed += 1
            self.progress.leave_out(cell.cost)
        else:
            self.progress.begin(cell)
            result = self._all_ranks_compute(cell)
            self.progress.advance(1.0)
            if ranks.is_first():
                self.store.write(cell, result)
            self.num_computed += 1
        self.done[cell.key] = result
        return result

    def _all_ranks_compute(self, cell: Cell) -> Result:
        start = None
        if cell.start is not None:
            self.all_ranks_obtain(cell.start)
            start = self.store.model_path(cell.start)
            self.progress.begin(cell)
        began, cpu_began = time.perf_counter(), time.process_time()
        if cell.setting is None:
            try:
                result = all_ranks_score_zero_shot(
                    cell.model, cell.data, self.plan.masking, self.plan.scorer, cell.seed, self.progress.advance,
                    untrained=cell.untrained,
                )  # fmt: skip
            except Unavailable as reason:
                return {"unavailable": str(reason)}
        else:
            result = all_ranks_fine_tune(
                cell.model, cell.data, cell.setting, cell.seed, self.machine, self.progress.advance,
                untrained=cell.untrained and start is None,
                start=start,
                keep=self.store.model_path(cell) if cell.keeps_model else None,
            )  # fmt: skip
        failure = result.pop("failure", None)
        return result | {
            "scores": score(cell.data, result["predictions"]),
            "collapsed": collapse_reason(cell.data, result["predictions"], failure),
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu_began,  # of this process; the fairer one on a shared machine
        }

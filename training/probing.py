"""--probe: what the model can do, measured during the run; the same figures on any number of ranks and on resume."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from common.console import console
from common.errors import Problems, UserError, nearest
from common.words import counted
from data.tokenizer import BertTokenizer
from evaluation.pseudo_likelihood.likelihood import Team
from evaluation.tasks.task import Task, choose_tasks
from evaluation.tasks.task_data import load_all
from training.checkpoints.state import Best
from training.clock import Clock
from training.engine.build import calling_parts_of
from training.metrics.sinks import Sinks
from training.metrics.timing import SectionTimer
from training.plan.horizon import look_ahead
from training.runtime import collectives
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests
from training.settings.flags import ProbeFlags

if TYPE_CHECKING:
    from evaluation.probes import Probe

PREFIX = "probe/"  # of the names that --keep_best_by takes
COLUMNS = {"text": "text", "label": "label"}  # of labelled tables
MAX_SHARE = 0.02  # of the run
PROBES_PER_INTERVAL = 2  # at most: a run that validates once has a probe before its first step and one at its end
MAX_SHARE_UNWARNED = 0.05
TRAINING_COST = 3.0  # of a token, in forward passes


class Stopped(Exception):
    """A stop request came during a probe, and the checkpoint is more urgent."""


def choose_probe_tasks(words: Sequence[str]) -> list[Task]:
    """The tasks that --probe names."""
    from evaluation.probes import check_kind  # imports scikit-learn, which takes a second

    try:
        tasks = choose_tasks(words, COLUMNS)
    except UserError as error:
        raise UserError(str(error).replace("--tasks", "--probe")) from None
    problems = Problems()
    for task in tasks:
        problems.attempt(partial(check_kind, task))
    problems.raise_if_any()
    return tasks


def check_probes(flags: ProbeFlags, keep_best_by: str | None) -> None:
    """Read the data of all probes, and check what the flags say about them."""
    if flags.probe is None:
        if keep_best_by is not None:
            raise UserError(
                f"--keep_best_by {keep_best_by}: there is no probe; add --probe, or use --keep_best for the loss"
            )
        return
    from evaluation.probes import probe_names

    tasks, problems = choose_probe_tasks(flags.probe), Problems()
    names = [PREFIX + name for task in tasks for name in probe_names(task)]
    if keep_best_by is not None and keep_best_by not in names:
        problems.add(
            f"--keep_best_by {keep_best_by}: is not a figure of --probe{nearest(keep_best_by, names)} (expected one of "
            f"{', '.join(names)})"
        )
    try:
        load_all(tasks, flags.probe_data)
    except UserError as error:
        for part in error.parts:
            problems.add(part.replace("--data", "--probe_data").replace("--tasks", "--probe"))
    problems.raise_if_any()


def load_probes(flags: ProbeFlags, tokenizer: BertTokenizer, max_positions: int) -> list["Probe"]:
    from evaluation.probes import build_probe

    assert flags.probe is not None
    data = load_all(choose_probe_tasks(flags.probe), flags.probe_data)
    probes = [build_probe(item, tokenizer, max_positions) for item in data]
    for item, probe in zip(data, probes, strict=True):
        notes = [*item.notes]
        if probe.num_shortened:
            notes.append(f"{item.task.name}: {counted(probe.num_shortened, 'text')} cut, because of the length")
        for note in notes:
            console.say(f"note: --probe {note}")
    return probes


@dataclass
class Prober:
    """Probes a run, and keeps track of the highest value of the probe that the run goes by."""

    engine: Any
    probes: Sequence["Probe"]
    rank_info: RankInfo
    stop: StopRequests
    timer: SectionTimer
    clock: Clock
    sinks: Sinks
    every_steps: int | None  # None: only at the end
    max_seconds: float | None  # --probe_seconds
    watched: str | None  # the figure that chooses the best checkpoint or ends the run, with PREFIX
    keeps_best: bool  # --keep_best_by
    has_warned: bool = field(default=False, init=False)
    ended_at: float = field(default=0.0, init=False)  # the last probe of this process; 0: there was none

    def is_due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def all_ranks_probe_start(self) -> None:
        """At the start of a run, measure the model before training, which all later figures are compared with.

        Skipped with a time budget but no --probe_every_steps: then the time to the first probe is not known.
        """
        state, is_known = self.clock.progress.state, self.every_steps is not None or not self.clock.has_budget
        if state.step > state.start_step or not is_known:
            return
        if not collectives.all_ranks_from_main(lambda: self.sinks.has("probe", state.step)):
            self._all_ranks_report()

    def all_ranks_probe(self, *, is_save_due: bool) -> Best | None:
        """Probe and report, unless a stop request comes. The mark of the checkpoint that --keep_best_by asks for."""
        figures = self._all_ranks_report()
        if figures is None or self.watched is None:
            return None
        value = figures[self.watched.removeprefix(PREFIX)]
        return self.clock.progress.note_probe(self.watched, value, is_kept=self.keeps_best, is_saved_anyway=is_save_due)

    def _all_ranks_report(self) -> dict[str, float] | None:
        """The figures, reported; None: a stop request came first."""
        began, progress = time.monotonic(), self.clock.progress
        try:
            with self.timer.measure("probe"):
                units = self.all_ranks_choose_units()
                figures = self.all_ranks_measure(self.probes, units)
        except Stopped:
            return None
        self.clock.budget.note_pause(time.monotonic() - began)
        self._warn_of_cost(began)
        console.say(
            probe_line(progress.step, [(p.task.name, p.unit, units[p.task.name]) for p in self.probes], figures)
        )
        self.sinks.record("probe", progress.step, progress.samples, figures)
        return figures

    def all_ranks_measure(self, probes: Sequence["Probe"], units: dict[str, int]) -> dict[str, float]:
        """The figures of `probes`; rank 0 judges, so that all ranks have the same."""
        team = Team(
            self.rank_info.rank, self.rank_info.world_size, collectives.all_ranks_gather, self._all_ranks_before_round
        )
        figures: dict[str, float] = {}
        for probe in probes:
            num_units = units[probe.task.name]
            with calling_parts_of(self.engine):
                computed = probe.compute(self.engine.module, num_units, team)
            figures |= collectives.all_ranks_from_main(partial(probe.judge, computed, num_units))
        return figures

    def _all_ranks_before_round(self) -> None:
        self.timer.begin("probe")
        if self.stop.all_ranks_agreed():
            raise Stopped

    def all_ranks_choose_units(self) -> dict[str, int]:
        """How many units of each probe are scored: decided once and saved, so all figures of a run are of the same.

        By default from the tokens between two probes, which are the same for any number of ranks; --probe_seconds
        needs a trial on this machine.
        """
        progress = self.clock.progress
        known = progress.state.probe_units or {}
        if all(probe.task.name in known for probe in self.probes):
            return {p.task.name: min(p.num_units, known[p.task.name]) for p in self.probes}
        chosen = self._units_by_tokens() if self.max_seconds is None else self._all_ranks_units_by_seconds()
        units = {name: known.get(name, num) for name, num in chosen.items()}
        progress.set_probe_units(units)
        return units

    def _units_by_tokens(self) -> dict[str, int]:
        share = MAX_SHARE / PROBES_PER_INTERVAL / len(self.probes)
        tokens = share * TRAINING_COST * self._tokens_between()
        return {probe.task.name: probe.units_for(tokens) for probe in self.probes}

    def _tokens_between(self) -> float:
        """Tokens of training between two probes: as so far, or at the start as the data has them on average."""
        state = self.clock.progress.state
        steps, tokens = state.step - state.start_step, float(state.tokens)
        if not steps:
            outlook = look_ahead(self.clock.horizon, state.step, state.samples)
            steps, tokens = outlook.steps_left, outlook.tokens_left
        return tokens * min(1.0, (self.every_steps or steps) / max(1, steps))

    def _all_ranks_units_by_seconds(self) -> dict[str, int]:
        """Choose the units that fit into --probe_seconds by rank 0's clock, from a trial of the fewest units."""
        assert self.max_seconds is not None
        units = {}
        for probe in self.probes:
            name, fewest = probe.task.name, probe.units_for(0.0)
            self.all_ranks_measure([probe], {name: fewest})  # the first passes are slower
            began = time.perf_counter()
            self.all_ranks_measure([probe], {name: fewest})
            taken = time.perf_counter() - began
            seconds = collectives.all_ranks_from_main(lambda taken=taken: max(taken, 1e-6))  # type: ignore[misc]
            tokens = float(probe.costs[:fewest].sum()) / seconds * self.max_seconds / len(self.probes)
            units[name] = probe.units_for(tokens)
        return units

    def _warn_of_cost(self, began: float) -> None:
        """Say once that probes take far more than their share, which happens because they have a smallest size."""
        now = time.monotonic()
        since, self.ended_at = now - self.ended_at if self.ended_at else None, now
        if since is None or self.max_seconds is not None or self.has_warned:
            return
        share = (now - began) / since
        if share > MAX_SHARE_UNWARNED:
            self.has_warned = True
            console.warn(
                f"--probe: probes take {share:.0%} of the time between them, expected about "
                f"{MAX_SHARE / PROBES_PER_INTERVAL:.0%}. Probe less often (--probe_every_steps), or fewer tasks"
            )


def probe_line(step: int, probes: Sequence[tuple[str, str, int]], figures: dict[str, float]) -> str:
    """`probes`: the name of each, and the unit and number of what it was scored on."""
    sizes = {name: f" ({counted(number, unit)})" for name, unit, number in probes}
    shown = ", ".join(f"{name} {value:.1%}{sizes.get(name, '')}" for name, value in figures.items())
    return f"probe at step {step}: {shown}"

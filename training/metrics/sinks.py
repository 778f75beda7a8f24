"""Where figures are written: TensorBoard, metrics.jsonl in the run's folder, and the monitors of DeepSpeed's config."""

import json
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from common.console import console
from common.files import append_whole, write_atomically
from training.metrics.board import Board
from training.metrics.charts import charts_of
from training.metrics.reader import read_valid_lines

KINDS = ("train", "validation", "probe")  # lines with figures; a line of kind "end" marks a finished run


class Position(Protocol):
    """How far a run has come: TrainingState has both."""

    @property
    def step(self) -> int: ...

    @property
    def samples(self) -> int: ...


class Sinks:
    """TensorBoard, JSON Lines, and DeepSpeed's `monitor` (CSV, W&B, Comet …). `is_main` False: they write nothing."""

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        resumed: Position,
        monitor: Any | None = None,
        *,
        num_ranks: int = 1,
        with_details: bool = False,
    ) -> None:
        self.monitor = monitor if is_main else None
        self.folder = folder if is_main else None
        self.lines = folder / "metrics.jsonl"
        self.board = Board(folder, num_ranks=num_ranks, with_details=with_details)
        self.failing: set[str] = set()  # sinks whose last write failed: warned of once per series of failures
        self.roll_back(resumed)

    def roll_back(self, position: Position) -> None:
        """Remove what was written after `position`, because those steps are taken again."""
        if self.folder is None:
            return
        files = getattr(self.monitor, "csv_monitor", None)
        if files is not None and self.lines.exists():  # not the first start of this run
            self._attempt("the CSV monitor", lambda: remove_later_csv_rows(files, position.step))
        self._attempt("metrics.jsonl", lambda: remove_later_lines(self.lines, position))
        self._attempt("TensorBoard", lambda: self.board.open(position.step + 1, position.samples + 1))

    def _attempt(self, name: str, action: Callable[[], None], kind: type[Exception] = OSError) -> None:
        """Call `action`; warn of an error of `kind`. A full disk or a failing service must not end the run."""
        try:
            action()
            self.failing.discard(name)
        except kind as error:
            if name not in self.failing:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                console.warn(f"{self.folder}: {name} cannot be written ({reason}). Training continues")
            self.failing.add(name)
            if name == "TensorBoard":
                self.board.abandon()

    def record(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        """Write figures of `kind`, one of KINDS, by step and by sample."""
        if self.folder is None:
            return
        row = {"kind": kind, "step": step, "samples": samples, "time": time.time(), **figures}
        self._attempt("metrics.jsonl", lambda: self._append(row))
        self._attempt("TensorBoard", lambda: self.board.scalars(kind, step, samples, figures))
        if self.monitor is not None:
            monitor, events = self.monitor, [(f"{kind}/{name}", value, step) for name, value in figures.items()]
            self._attempt("the DeepSpeed monitor", lambda: monitor.write_events(events), Exception)

    def has(self, kind: str, step: int) -> bool:
        """Whether a line of `kind` was recorded for `step`, by this process or an earlier one of this run."""
        return any(row.get("kind") == kind and row.get("step") == step for row in self._recorded())

    def _recorded(self) -> list[dict[str, Any]]:
        """Lines of this process and of earlier ones; [] where they cannot be read."""
        try:
            return read_valid_lines(self.lines)
        except OSError:
            return []

    def _recorded_tags(self) -> set[str]:
        """Tags of the charts that have a value; a restart at the end of a run has recorded none itself."""
        return {
            chart.tag
            for row in self._recorded()
            if row.get("kind") in KINDS
            for key, chart in charts_of(row["kind"], num_ranks=1, with_details=False).items()
            if key in row
        }

    def _append(self, row: dict[str, Any]) -> None:
        append_whole(self.lines, json.dumps({key: _json_number(value) for key, value in row.items()}) + "\n")

    def text(self, name: str, content: str, step: int | None = None) -> None:
        if self.folder is not None:
            self._attempt("TensorBoard", lambda: self.board.text(name, content, step))

    def histograms(self, model: nn.Module, step: int) -> None:
        """The distribution of every parameter's values."""
        if self.folder is not None:
            for name, parameter in model.named_parameters():
                values = parameter.detach().float().cpu()
                self._attempt("TensorBoard", partial(self.board.histogram, name.replace(".", "/"), values, step))

    def finish(self, hyperparameters: dict[str, Any], position: Position, hardware: str) -> None:
        """Mark the run as finished, and add it to TensorBoard's table of runs."""
        if self.folder is None:
            return
        self._attempt("TensorBoard", lambda: self.board.table_of_runs(hyperparameters, self._recorded_tags()))
        place = {"step": position.step, "samples": position.samples}
        row = {"kind": "end", **place, "time": time.time(), "hardware": hardware}
        self._attempt("metrics.jsonl", lambda: self._append(row))
        self.close()

    def close(self) -> None:
        if self.folder is not None:
            self._attempt("TensorBoard", self.board.close)


def remove_later_csv_rows(monitor: Any, step: int) -> None:
    """Remove rows after `step` from the files of DeepSpeed's CSV monitor, and make it append to these files.

    Otherwise it would start each file again with a second header.
    """
    for path in sorted(Path(monitor.log_dir).glob("*.csv")):
        if path.stem.split("_")[0] in KINDS:
            header, *rows = path.read_text().splitlines() or [""]
            kept = [row for row in rows if row.partition(",")[0].isdecimal() and int(row.partition(",")[0]) <= step]
            write_atomically(path, "".join(f"{row}\r\n" for row in (header, *kept)))
            monitor.filenames.append(path.stem)


def remove_later_lines(path: Path, position: Position) -> None:
    """Remove lines that an interrupted run wrote after the checkpoint it resumes from, and an incomplete last line.

    By samples too: rows of a skipped step advance the samples without a step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    rows = [row for row in read_valid_lines(path) if row.get("step", 0) <= position.step]
    kept = [row for row in rows if _samples(row) <= position.samples]
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in kept))


def _samples(row: dict[str, Any]) -> int:
    samples = row.get("samples", 0)
    return samples if isinstance(samples, int) else 0


@contextmanager
def without_writer_tracebacks() -> Generator[None]:
    """Replace `threading.excepthook` while entered: TensorBoard's writer thread ends silently when the disk is full.

    The error itself is raised at the next write.
    """
    before = threading.excepthook

    def hook(report: threading.ExceptHookArgs) -> None:
        if not (isinstance(report.exc_value, OSError) and type(report.thread).__name__ == "_AsyncWriterThread"):
            before(report)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

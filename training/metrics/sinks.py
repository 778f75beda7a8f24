"""Where figures are written: TensorBoard, metrics.jsonl in the run's folder, and the monitors of DeepSpeed's config."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from common.console import console
from common.files import append_whole, write_atomically
from training.metrics.board import Board
from training.metrics.reader import read_valid_lines

KINDS = ("train", "validation", "probe")  # lines with figures; a line of kind "end" marks a finished run


class Sinks:
    """TensorBoard, JSON Lines, and DeepSpeed's `monitor` (CSV, W&B, Comet …). `is_main` False: they write nothing.

    `step` and `samples`: where the run starts or resumes.
    """

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        step: int,
        samples: int,
        monitor: Any | None = None,
        *,
        num_ranks: int = 1,
        with_details: bool = False,
    ) -> None:
        self.monitor = monitor if is_main else None
        self.folder, self.is_main = folder, is_main
        self.lines = folder / "metrics.jsonl"
        self.board = Board(folder, num_ranks=num_ranks, with_details=with_details)
        self.failing: set[str] = set()  # sinks whose last write failed: warned of once per series of failures
        self.roll_back(step, samples)

    def roll_back(self, step: int, samples: int) -> None:
        """Remove what was written after `step` and `samples`, because those steps are taken again."""
        files = getattr(self.monitor, "csv_monitor", None)
        if files is not None and self.lines.exists():  # not the first start of this run
            self._attempt("the CSV monitor", lambda: remove_later_csv_rows(files, step))
        self._attempt("metrics.jsonl", lambda: remove_later_lines(self.lines, step, samples))
        self._attempt("TensorBoard", lambda: self.board.open(step + 1, samples + 1))

    def _attempt(self, name: str, action: Callable[[], None], kind: type[Exception] = OSError) -> None:
        """Call `action`; warn of an error of `kind`. A full disk or a failing service must not end the run."""
        if not self.is_main:
            return
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

    def _append(self, row: dict[str, Any]) -> None:
        infinite = {key: str(value) for key, value in row.items() if isinstance(value, float) and not isfinite(value)}
        append_whole(self.lines, json.dumps(row | infinite) + "\n")

    def text(self, name: str, content: str, step: int | None = None) -> None:
        self._attempt("TensorBoard", lambda: self.board.writer().add_text(name, content, step))

    def histograms(self, model: nn.Module, step: int) -> None:
        """The distribution of every parameter's values."""

        def write() -> None:
            for name, parameter in model.named_parameters():
                self.board.writer().add_histogram(name.replace(".", "/"), parameter.detach().float().cpu(), step)

        self._attempt("TensorBoard", write)

    def finish(self, hyperparameters: dict[str, Any], step: int, samples: int, hardware: str) -> None:
        """Mark the run as finished, and add it to TensorBoard's table of runs."""
        self._attempt("TensorBoard", lambda: self.board.table_of_runs(hyperparameters, self._recorded()))
        row = {"kind": "end", "step": step, "samples": samples, "time": time.time(), "hardware": hardware}
        self._attempt("metrics.jsonl", lambda: self._append(row))
        self.close()

    def close(self) -> None:
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


def remove_later_lines(path: Path, step: int, samples: int) -> None:
    """Remove lines that an interrupted run wrote after the checkpoint it resumes from, and an incomplete last line.

    By samples too: rows of a skipped step advance the samples without a step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    rows = read_valid_lines(path)
    kept = [row for row in rows if row.get("step", 0) <= step and row.get("samples", 0) <= samples]
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in kept))


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

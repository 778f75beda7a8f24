"""Where figures go: TensorBoard, a JSON Lines file in the run's folder, and the monitors of DeepSpeed's config."""

import json
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from common.console import console

FINAL = ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity", "tokens", "tokens_per_second")
BY_SAMPLES = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate")


class Sinks:
    """TensorBoard and JSON Lines, and the engine's `monitor` (CSV, W&B, Comet …). Only rank 0 has any."""

    def __init__(self, folder: Path, is_main: bool, resumed_step: int, monitor: Any = None) -> None:
        self.monitor = monitor if is_main and monitor is not None and monitor.enabled else None
        if monitor is not None:
            # The engine would write its rate too, by samples. W&B drops what comes for a lower step than the last, so
            # beside that axis our figures, by steps, would be lost.
            monitor.enabled = False
        self.last: dict[str, float] = {}
        self.folder = folder if is_main else None
        self.lines = folder / "metrics.jsonl"
        self.writer: SummaryWriter | None = None
        self.failing: set[str] = set()  # sinks whose last write failed: told once, and again after it has worked
        threading.excepthook = _hush_writer_thread
        self.go_back(resumed_step)

    def go_back(self, step: int) -> None:
        """Forget what was written after `step`: it is going to happen again, perhaps otherwise."""
        if self.folder is None:
            return
        self._attempt("metrics.jsonl", lambda: forget_later_lines(self.lines, step))
        self._attempt("TensorBoard", lambda: self._open_writer(step))

    def _open_writer(self, step: int) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        """A disk that is full must not end a run for its logs."""
        try:
            action()
            self.failing.discard(name)
        except OSError as error:
            if name not in self.failing:
                console.warn(f"{self.folder}: {name} cannot be written ({error.strerror or error}); training goes on")
            self.failing.add(name)
            if name == "TensorBoard":
                self.writer = None  # its thread has died of the error

    def record(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        """One line of `kind` ("train" or "validation"), on steps and on samples."""
        if self.folder is None:
            return
        self.last.update({f"{kind}/{name}": value for name, value in figures.items()})
        row = {"kind": kind, "step": step, "samples": samples, "time": time.time(), **figures}
        self._attempt("metrics.jsonl", lambda: self._append(row))
        self._attempt("TensorBoard", lambda: self._scalars(kind, step, samples, figures))
        if self.monitor is not None:
            monitor, events = self.monitor, [(f"{kind}/{name}", value, step) for name, value in figures.items()]
            self._attempt("the DeepSpeed monitor", lambda: monitor.write_events(events))

    def _append(self, row: dict[str, Any]) -> None:
        with self.lines.open("a") as stream:
            stream.write(json.dumps({key: _json_number(value) for key, value in row.items()}) + "\n")

    def _scalars(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        writer = self._writer()
        for name, value in figures.items():
            writer.add_scalar(f"{kind}/{name}", value, step)
            if name in BY_SAMPLES:
                writer.add_scalar(f"{kind}_by_samples/{name}", value, samples)
        writer.flush()

    def _writer(self) -> SummaryWriter:
        if self.writer is None:
            self._open_writer(0)
        assert self.writer is not None
        return self.writer

    def text(self, name: str, content: str, step: int | None = None) -> None:
        if self.folder is not None:
            self._attempt("TensorBoard", lambda: self._writer().add_text(name, content, step))

    def histograms(self, model: nn.Module, step: int) -> None:
        """The distribution of every parameter's values."""
        if self.folder is not None:
            for name, parameter in model.named_parameters():
                values = parameter.detach().float().cpu()
                self._attempt("TensorBoard", partial(self._histogram, name.replace(".", "/"), values, step))

    def _histogram(self, name: str, values: Tensor, step: int) -> None:
        self._writer().add_histogram(name, values, step)

    def close(self, hyperparameters: dict[str, Any] | None = None) -> None:
        """With `hyperparameters`, enter them and the last figures into TensorBoard's table of runs."""
        if self.folder is None:
            return
        results = {f"final/{name}": value for name, value in self.last.items() if name.rsplit("/")[-1] in FINAL}
        if hyperparameters is not None and results:
            plain = {
                key: value for key, value in hyperparameters.items() if isinstance(value, bool | int | float | str)
            }
            self._attempt("TensorBoard", lambda: self._writer().add_hparams(plain, results, run_name="."))
        if self.writer is not None:
            self._attempt("TensorBoard", self.writer.close)


def forget_later_lines(path: Path, step: int) -> None:
    """Drop what an interrupted run wrote after the checkpoint it is resumed from, and a torn last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("step", 0) <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)


def _hush_writer_thread(report: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread dies of a full disk with a traceback; the error itself reaches us at the next write."""
    if not (isinstance(report.exc_value, OSError) and type(report.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(report)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

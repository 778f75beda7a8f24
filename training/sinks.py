"""Where figures go: TensorBoard, a JSON Lines file in the run's folder, and the monitors of DeepSpeed's config."""

import json
import math
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter

FINAL = ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity", "tokens", "tokens_per_second")
BY_SAMPLES = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate")


class Sinks:
    """TensorBoard and JSON Lines, and the engine's `monitor` (CSV, W&B, Comet …). Only rank 0 has any."""

    def __init__(self, folder: Path, is_main: bool, resumed_step: int, monitor: Any = None) -> None:
        self.monitor = monitor if is_main and monitor is not None and monitor.enabled else None
        self.last: dict[str, float] = {}
        self.writer: SummaryWriter | None = None
        self.lines: Path | None = None
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self.lines = folder / "metrics.jsonl"
            forget_later_lines(self.lines, resumed_step)
            self.writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def record(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        """One line of `kind` ("train" or "validation"), on steps and on samples."""
        if self.writer is None or self.lines is None:
            return
        row = {"kind": kind, "step": step, "samples": samples, "time": time.time(), **figures}
        with self.lines.open("a") as stream:
            stream.write(json.dumps({key: _json_number(value) for key, value in row.items()}) + "\n")
        self.last.update({f"{kind}/{name}": value for name, value in figures.items()})
        if self.monitor is not None:
            self.monitor.write_events([(f"{kind}/{name}", value, step) for name, value in figures.items()])
        for name, value in figures.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)
            if name in BY_SAMPLES:
                self.writer.add_scalar(f"{kind}_by_samples/{name}", value, samples)
        self.writer.flush()

    def text(self, name: str, content: str, step: int | None = None) -> None:
        if self.writer is not None:
            self.writer.add_text(name, content, step)

    def histograms(self, model: nn.Module, step: int) -> None:
        """The distribution of every parameter's values."""
        if self.writer is not None:
            for name, parameter in model.named_parameters():
                self.writer.add_histogram(name.replace(".", "/"), parameter.detach().float().cpu(), step)

    def close(self, hyperparameters: dict[str, Any] | None = None) -> None:
        """With `hyperparameters`, enter them and the last figures into TensorBoard's table of runs."""
        if self.writer is None:
            return
        results = {f"final/{name}": value for name, value in self.last.items() if name.rsplit("/")[-1] in FINAL}
        if hyperparameters is not None and results:
            plain = {
                key: value for key, value in hyperparameters.items() if isinstance(value, bool | int | float | str)
            }
            self.writer.add_hparams(plain, results, run_name=".")
        self.writer.close()


def forget_later_lines(path: Path, step: int) -> None:
    """Drop what an interrupted run wrote after the checkpoint it is resumed from, and a torn last line."""
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


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

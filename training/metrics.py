"""Figures of a run: sums kept on the device, reduced over all ranks once a window, and written to every sink."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from common.console import console
from training import distributed


class Tally:
    """Sums of the model's details. Adding is asynchronous; reading them synchronises, once."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None
        self.names: tuple[str, ...] = ()

    def add(self, details: Any) -> None:
        """Add one forward's details: a named tuple of 0-dim tensors."""
        values = torch.stack([value.detach().double() for value in details])
        self.names = details._fields
        self.sums = values if self.sums is None else self.sums + values

    def take(self) -> dict[str, float]:
        """The sums over all ranks since the last call; begins anew."""
        assert self.sums is not None, "take() before the first add()"
        totals = distributed.sum_over_ranks(self.sums).tolist()
        self.sums = None
        return dict(zip(self.names, totals, strict=True))


def summarize(sums: dict[str, float]) -> dict[str, float]:
    """Means per masked token and per pair from a tally's sums."""
    masked = max(sums["masked_lm_count"], 1.0)
    pairs = max(sums["next_sentence_count"], 1.0)
    mlm = sums["masked_lm_loss_sum"] / masked
    nsp = sums["next_sentence_loss_sum"] / pairs
    return {
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp,
        "mlm_accuracy": sums["masked_lm_correct"] / masked,
        "nsp_accuracy": sums["next_sentence_correct"] / pairs,
    }


class Stopwatch:
    """Wall time since the last lap, and the part of it spent waiting for data."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.data_wait = 0.0

    def lap(self) -> tuple[float, float]:
        now = time.perf_counter()
        elapsed, waited = now - self.started, self.data_wait
        self.started, self.data_wait = now, 0.0
        return elapsed, waited


class Sinks:
    """Console, TensorBoard and JSON Lines. Only rank 0 has any."""

    def __init__(self, folder: Path, is_main: bool, resumed_step: int) -> None:
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
        for name, value in figures.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)
            if name in ("loss", "mlm_loss", "nsp_loss"):
                self.writer.add_scalar(f"{kind}_by_samples/{name}", value, samples)
        self.writer.flush()

    def text(self, name: str, content: str) -> None:
        if self.writer is not None:
            self.writer.add_text(name, content)

    def close(self) -> None:
        if self.writer is not None:
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


def train_line(step: int, last_step: int, figures: dict[str, float]) -> str:
    remaining = (last_step - step) * figures["seconds_per_step"]
    return (
        f"step {step}/{last_step}  loss {figures['loss']:.3f}  mlm {figures['mlm_loss']:.3f} "
        f"({figures['mlm_accuracy']:.1%})  nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})  "
        f"rate {figures['learning_rate']:.2e}  {figures['tokens_per_second']:,.0f} tokens/s  "
        f"data wait {figures['data_wait_share']:.0%}  left {format_seconds(remaining)}"
    )


def say_validation(step: int, figures: dict[str, float]) -> None:
    console.say(
        f"validation at step {step}: mlm loss {figures['mlm_loss']:.3f} (perplexity {figures['perplexity']:.1f}, "
        f"{figures['mlm_accuracy']:.1%} right)  nsp loss {figures['nsp_loss']:.3f} "
        f"({figures['nsp_accuracy']:.1%} right)"
    )


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Cells: one fine-tuning or one zero-shot scoring, kept in a file of its own, so that an interrupted run resumes."""

import hashlib
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from common.files import write_atomically
from evaluation.finetuning.finetune import Setting
from evaluation.finetuning.models import ModelFolder
from evaluation.tasks.task_data import TaskData

CELL_VERSION = 1
CHARACTERS_PER_TOKEN = 5  # about; for the progress line
Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One piece of work. `purpose` "select" is scored on rows held out of train, "score" on the evaluation files."""

    model: ModelFolder
    data: TaskData
    seed: int
    setting: Setting | None  # None: zero-shot
    untrained: bool = False
    purpose: Literal["score", "select"] = "score"
    start: "Cell | None" = None  # the fine-tuning whose model this one starts from
    keeps_model: bool = False
    scoring: str = ""  # of zero-shot tasks: masking and the like

    @property
    def weights(self) -> str:
        """What names the weights: for untrained cells the architecture, which several models may share."""
        return self.model.architecture_digest if self.untrained else self.model.digest

    @property
    def key(self) -> str:
        """A digest of all that the result depends on."""
        setting = None if self.setting is None else asdict(self.setting)
        sizes = [len(self.data.train), {split: len(rows) for split, rows in self.data.dev.items()}]
        what = [self.weights, self.untrained, self.data.digest, sizes, self.purpose]
        start = None if self.start is None else self.start.key
        content = [CELL_VERSION, what, self.seed, setting, start, self.scoring]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def folder(self) -> str:
        return "untrained" if self.untrained else self.model.name

    @property
    def file_name(self) -> str:
        how = "zero_shot" if self.setting is None else self.setting.label
        parts = [self.data.task.name, how, f"seed{self.seed}"]
        parts += [f"from_{self.start.data.task.name}"] if self.start else []
        parts += ["select"] if self.purpose == "select" else []
        return "-".join(parts) + f"-{self.key[:8]}"

    @property
    def description(self) -> str:
        model = f"{self.model.name}{' (untrained)' if self.untrained else ''}"
        how = "zero-shot" if self.setting is None else f"seed {self.seed}"
        return f"{self.data.task.shown_name}, {model}, {how}"

    @property
    def cost(self) -> float:
        """A guess of its time, in units that are the same for all cells: tokens times parameters."""
        rows = len(self.data.train) * (3 * self.setting.epochs if self.setting else 0)
        rows += sum(len(part) for part in self.data.dev.values()) * (1 if self.setting else 20)
        sample = (self.data.train or next(iter(self.data.dev.values())))[:200]
        num_tokens = statistics.fmean(len(str(row)) for row in sample) / CHARACTERS_PER_TOKEN
        return rows * min(num_tokens, self.data.task.max_length) * self.model.num_parameters


class CellStore:
    """Finished cells below the output folder. A damaged or half-written file counts as not there."""

    def __init__(self, output: Path) -> None:
        self.root = output / "cells"
        self.num_damaged = 0

    def path_of(self, cell: Cell) -> Path:
        return self.root / cell.folder / f"{cell.file_name}.json"

    def model_path(self, cell: Cell) -> Path:
        return self.root.parent / "models" / cell.folder / cell.file_name

    def read(self, cell: Cell) -> Result | None:
        path = self.path_of(cell)
        try:
            envelope = json.loads(path.read_text(encoding="utf-8"))
            result: Result = envelope["result"]
            is_good = envelope["key"] == cell.key and envelope["checksum"] == _checksum(result)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            is_good = False
        if not is_good:
            self.num_damaged += 1
            return None
        if cell.keeps_model and not (self.model_path(cell) / "config.json").is_file():
            return None
        return result

    def write(self, cell: Cell, result: Result) -> None:
        path = self.path_of(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        envelope = {"key": cell.key, "checksum": _checksum(result), "result": result}
        write_atomically(path, json.dumps(envelope))


def _checksum(result: Result) -> str:
    # Through JSON once: what is read back must give the same text as what was written.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(result)), sort_keys=True).encode()).hexdigest()

"""The work folder of a preparation: what each task made, and which tasks are done."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from data.preparation.instances import Documents, Instances

WORK_FORMAT = 5  # of what tasks leave for each other: changes with how sources are cut and what their results hold
DONE = "done"  # the folder of the tasks' results


class WorkFolder:
    """Paths and small files. A task's result is written last and whole, so a task without one is simply run again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("raw", "text", "hashes", "keys", "signatures", "keep", "tokens", "instances", DONE):
            (root / name).mkdir(parents=True, exist_ok=True)

    def result_path(self, stage: str, task: str) -> Path:
        return self.root / DONE / f"{stage}.{task}.json"

    def result(self, stage: str, task: str) -> Any | None:
        path = self.result_path(stage, task)
        return json.loads(path.read_text()) if path.is_file() else None

    def save_result(self, stage: str, task: str, result: Any) -> None:
        """Complete or absent for whoever looks after a kill; not flushed, which would cost more than the task."""
        path = self.result_path(stage, task)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(result))
        temporary.replace(path)

    def forget(self, stage: str, task: str) -> None:
        """Have a task run again."""
        self.result_path(stage, task).unlink(missing_ok=True)

    def text_path(self, piece: str) -> Path:
        return self.root / "text" / f"{piece}.txt"

    def save_array(self, kind: str, name: str, array: np.ndarray) -> None:
        np.save(self.root / kind / f"{name}.npy", array, allow_pickle=False)

    def load_array(self, kind: str, name: str) -> np.ndarray:
        return np.load(self.root / kind / f"{name}.npy", allow_pickle=False)

    def save_documents(self, name: str, documents: Documents) -> None:
        np.savez(self.root / "tokens" / f"{name}.npz", **documents._asdict())

    def load_documents(self, name: str) -> Documents:
        with np.load(self.root / "tokens" / f"{name}.npz", allow_pickle=False) as stored:
            return Documents(*(stored[field] for field in Documents._fields))

    def save_instances(self, name: str, instances: Instances) -> None:
        self.save_array("instances", name, np.stack(instances).astype(np.int32))

    def load_instances(self, name: str) -> Instances:
        return Instances(*self.load_array("instances", name).astype(np.int64))

"""DeepSpeed's monitors get our figures: the real monitor writes to fakes of the W&B and Comet modules."""

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here

# Like the real module, it drops what is logged for an earlier step than the last.
WANDB = """
runs, logged = [], []

def init(**options):
    runs.append(options)

def log(data, step=None, commit=None):
    if not logged or step >= logged[-1][1]:
        logged.extend((name, step, value) for name, value in data.items())
"""
COMET = """
__version__ = "3.47.0"
runs, logged, names = [], [], []

class Experiment:
    def set_name(self, name):
        names.append(name)

    def __internal_api__log_metric__(self, name, value, step):
        logged.append((name, step, value))

def start(**options):
    runs.append(options)
    return Experiment()
"""
BLOCKS = {
    "csv_monitor": {"enabled": True, "job_name": "figures"},
    "wandb": {"enabled": True, "project": "encoders", "group": "tiny", "team": "us"},
    "comet": {"enabled": True, "project": "encoders", "experiment_name": "first", "samples_log_interval": 2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, Any]]:
    """A run's folder, and both modules with what they received."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "modules").mkdir()
    (folder / "modules" / "wandb.py").write_text(WANDB)
    (folder / "modules" / "comet_ml.py").write_text(COMET)
    BLOCKS["csv_monitor"]["output_path"] = str(folder / "csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "modules"))
        run_here([*write_project(folder, **BLOCKS), "--max_steps", "4", "--validate_every_steps", "2"])
        yield folder, importlib.import_module("wandb"), importlib.import_module("comet_ml")
    for name in ("wandb", "comet_ml"):
        del sys.modules[name]


def figures(folder: Path, *, steps: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """(name, step) → value, as metrics.jsonl has them."""
    return {
        (f"{kind}/{name}", row["step"]): value
        for kind in ("train", "validation")
        for row in read_metrics(folder, kind)
        if row["step"] in steps
        for name, value in row.items()
        if name not in ("kind", "step", "samples", "time")
    }


def test_wandb(finished: tuple[Path, Any, Any]) -> None:
    folder, wandb, _ = finished
    assert wandb.runs == [{"project": "encoders", "group": "tiny", "entity": "us"}]
    assert {(name, step): value for name, step, value in wandb.logged} == figures(folder, steps=(1, 2, 3, 4))


def test_comet(finished: tuple[Path, Any, Any]) -> None:
    folder, _, comet = finished
    assert [run["project"] for run in comet.runs] == ["encoders"]
    assert comet.names == ["first"]
    logged = {(name, step): value for name, step, value in comet.logged}
    expected = {key: value for key, value in figures(folder, steps=(1, 3)).items() if key[0].startswith("train/")}
    expected.update({k: v for k, v in figures(folder, steps=(2, 4)).items() if k[0].startswith("validation/")})
    assert logged == expected  # every second step of each name


def test_csv(finished: tuple[Path, Any, Any]) -> None:
    folder, _, _ = finished
    found = {}
    for path in (folder / "csv" / "figures").iterdir():
        kind, name = path.stem.split("_", 1)
        header, *rows = csv.reader(path.read_text().splitlines())
        assert header == ["step", name]
        found.update({(f"{kind}/{name}", int(step)): float(value) for step, value in rows})
    assert found == figures(folder, steps=(1, 2, 3, 4))

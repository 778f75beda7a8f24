"""docs/training.md: its commands parse, and it explains every metric that a run writes."""

import re
import shlex
from pathlib import Path

from scripts.two_phases import read_phases
from tests.support import PROJECT, read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.settings.flags import build_parser

PAGE = (PROJECT / "docs" / "training.md").read_text()


def commands(script: str) -> list[list[str]]:
    return [shlex.split(line)[2:] for line in PAGE.splitlines() if line.startswith(f"    python {script}")]


def test_commands_parse_and_their_files_exist() -> None:
    plain, phases = commands("deepspeed_train.py"), commands("scripts/two_phases.py")
    assert len(plain) == 5
    assert len(phases) == 1
    for words in (*plain, *(phase.words for phase in read_phases(phases[0]))):
        parsed = build_parser().parse_args(words)
        assert (PROJECT / parsed.config_file).is_file()
        assert (PROJECT / parsed.deepspeed_config).is_file()


def test_every_metric_is_explained_and_no_other(tmp_path: Path) -> None:
    run_here([*write_project(tmp_path), "--max_steps", "1"])
    (row,) = read_metrics(tmp_path, "train")
    table = [line for line in PAGE.splitlines() if line.startswith("| `")]
    explained = {name for line in table for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert explained - {"loss_scale"} == set(row) - {"kind", "step", "samples", "time"}

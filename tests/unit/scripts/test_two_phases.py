"""Two phases as one recipe: what phase 2 starts from, and where an interrupted recipe goes on."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from scripts.two_phases import build_parser, phase_words, remaining_phases
from tests.support import make_rows, read_metrics, write_nvidia_shard, write_project
from tests.unit.training.in_process import run_here
from training.schedule import Schedule

SHORT, LONG = 16, 24
PASSED_ON = ["--print_steps", "1"]


def write_phases(folder: Path) -> list[str]:
    """A project with rows of both lengths; the recipe's words."""
    write_project(folder, width=LONG)
    for index in range(2):
        rows = make_rows(20, SHORT, 4, seed=index)
        write_nvidia_shard(folder / "short" / f"wiki_training_{index}.hdf5", rows)
    path = folder / "model.json"
    content = json.loads(path.read_text())
    content["data"]["mixed_seq_datasets"][str(SHORT)] = {"wiki": "short"}
    content["mixed_seq_training"][str(SHORT)] = {
        **content["mixed_seq_training"][str(LONG)],
        "total_training_steps": 6,
    }
    content["mixed_seq_training"][str(LONG)]["total_training_steps"] = 20
    del content["validation"]
    path.write_text(json.dumps(content))
    engine = str(folder / "deepspeed.json")
    return [
        *("--cf", str(path), "--deepspeed_configs", engine, engine, "--output_dir", str(folder / "out")),
        *("--name", "two", "--lengths", str(SHORT), str(LONG), "--predictions", "4", "4"),
    ]


def test_interrupted_in_phase_two_it_goes_on_there_without_warming_up_again(tmp_path: Path) -> None:
    flags = build_parser().parse_args(write_phases(tmp_path))
    passed_on = [*PASSED_ON, "--data_path_prefix", str(tmp_path)]
    assert remaining_phases(flags) == (0, 1)
    run_here(phase_words(flags, 0, passed_on))
    assert [row["step"] for row in read_metrics(tmp_path, "train", f"two_{SHORT}")] == list(range(1, 7))
    assert remaining_phases(flags) == (0, 1)  # phase 1 will say that it is finished

    run_here([*phase_words(flags, 1, passed_on), "--max_steps", "5"])  # stands for an interruption
    assert remaining_phases(flags) == (1,)
    run_here(phase_words(flags, 1, passed_on))
    rows = read_metrics(tmp_path, "train", f"two_{LONG}")
    assert [row["step"] for row in rows] == list(range(7, 27))
    schedule = Schedule("LE", peak=0.003, total_steps=20, warmup_proportion=0.1, origin=6)
    assert [row["learning_rate"] for row in rows] == pytest.approx([schedule.rate(step) for step in range(6, 26)])


def test_equal_lengths_are_refused(tmp_path: Path) -> None:
    words = [*write_phases(tmp_path), "--lengths", "16", "16"]
    with pytest.raises(UserError, match="must differ"):
        remaining_phases(build_parser().parse_args(words))

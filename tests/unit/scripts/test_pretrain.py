"""scripts/pretrain.py: the commands that a recipe becomes. The stages themselves are tested with their commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from scripts.pretrain import main, read_recipe, stages_of, words
from tests.support import PROJECT, run_command
from tests.unit.evaluation.tiny import write_reviews
from training.runtime.chain import Chain

RECIPE = {
    "name": "mine",
    "text": ["text"],
    "output_dir": "out",
    "model": str(PROJECT / "configs" / "quickstart.json"),
    "deepspeed": str(PROJECT / "configs" / "ds_quickstart.json"),
    "max_seq_length": 64,
    "max_predictions_per_seq": 10,
}


def write_recipe(folder: Path, **more: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps({**RECIPE, **more}))
    return path


def test_stages_pass_on_what_the_recipe_says(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path, time_budget="1h", tasks=["reviews.csv"], task_data="glue", train={"keep_last": 2, "keep_best": True},
        evaluate={"label": "stars"}, prepare={"max_seq_length": [64, 128]},
    )  # fmt: skip
    commands = {stage.name: " ".join(stage.command) for stage in stages_of(read_recipe(path))}
    assert list(commands) == ["prepare", "train", "export", "evaluate", "model card"]
    assert "--input text --output_dir out/data/hdf5 --max_seq_length 64 128" in commands["prepare"]
    assert "--vocab_size 4096" in commands["prepare"], "as the model JSON has it"
    assert "--time_budget 1h --probe reviews.csv --probe_data glue --keep_last 2 --keep_best" in commands["train"]
    assert "--checkpoint out/saved_models/mine --output out/model" in commands["export"]
    assert "--data glue --output out/evaluation --text text --label stars" in commands["evaluate"]
    without = {stage.name: stage.command for stage in stages_of(read_recipe(write_recipe(tmp_path, ranks=2)))}
    assert list(without) == ["prepare", "train", "export"]
    assert "--num_gpus" in without["train"]
    assert words({"a": None, "b": False, "c": True, "d": [1, "x"]}) == ["--c", "--d", "1", "x"]


def test_a_failed_stage_ends_the_command_and_a_dry_run_runs_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(Chain, "run", lambda _self, command: ran.append(command) or (3 if "--cf" in command else 0))
    path = write_recipe(tmp_path, tasks=["blimp"])
    assert main([str(path)]) == 3
    assert [("data.prepare" in command, "--cf" in command) for command in ran] == [(True, False), (False, True)]
    assert "train ended with code 3; the same command resumes there" in capsys.readouterr().err
    ran.clear()
    assert main([str(path), "--dry_run"]) == 0
    assert [command[-1] for command in ran] == ["--dry_run"], "of the evaluation alone: there are no shards yet"


def test_mistakes_in_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'tasksx'; did you mean 'tasks'"):
        read_recipe(write_recipe(tmp_path, tasksx=[]))
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        read_recipe(write_recipe(tmp_path, model="none.json"))


@pytest.mark.slow
def test_text_becomes_an_evaluated_model_and_the_command_resumes(tmp_path: Path) -> None:
    write_reviews(tmp_path / "reviews.csv", 200)
    rows = (tmp_path / "reviews.csv").read_text().splitlines()[1:]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(row.rsplit(",", 1)[0] for row in rows) * 5)
    path = write_recipe(
        tmp_path, tasks=["reviews.csv"], prepare={"dupe_factor": 1, "vocab_size": 200},
        train={"max_steps": 6, "validate_every_steps": 3, "probe": None}, evaluate={"label": "stars", "seeds": 1},
    )  # fmt: skip
    command = ["python", str(PROJECT / "scripts" / "pretrain.py"), str(path)]
    for expected in ("2 cells computed", "0 cells computed, 2 kept from before"):
        outcome = run_command(command, cwd=tmp_path, timeout=600)
        assert outcome.returncode == 0, outcome.stderr
        assert expected in outcome.stdout
    assert "finished already, at step 6" in outcome.stdout
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert card.count("## Evaluation on other tasks") == 1
    assert "| reviews | accuracy |" in card

"""Values of the JSON files that are set on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from tests.support import write_project
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.overrides import Override, apply_overrides
from training.settings.resolve import Settings, resolve_settings


def resolve(words: list[str], world_size: int = 1) -> Settings:
    flags, problems = read_arguments(words)
    return resolve_settings(flags, RankInfo(0, 0, world_size, world_size), problems)


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        resolve(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("mixed_seq_training.128.learning_rate=4e-4", ("mixed_seq_training", "128", "learning_rate"), 4e-4),
        ("fp16.enabled=true", ("fp16", "enabled"), True),
        ("optimizer.type=Lamb", ("optimizer", "type"), "Lamb"),
        ("name=a=b", ("name",), "a=b"),
        ('optimizer.params={"betas": [0.9, 0.98]}', ("optimizer", "params"), {"betas": [0.9, 0.98]}),
        ("validation=null", ("validation",), None),
    ],
)
def test_a_value_is_json_or_a_word(text: str, path: tuple[str, ...], value: Any) -> None:
    override = Override.parse(text)
    assert (override.path, override.value) == (path, value)


@pytest.mark.parametrize("text", ["learning_rate", "=3", "a..b=1", "a=", "a=[1", "a=NaN", 'a={"b": 1, "b": 2}'])
def test_what_is_not_a_setting_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"mixed_seq_training\.128\.learning_rate=4e-4"):
        Override.parse(text)


def test_the_last_of_two_values_counts_and_the_content_is_not_changed() -> None:
    content = {"a": {"b": 1}}
    overrides = [Override.parse(text) for text in ("a.b=2", "a.c.d=3", "a.b=4")]
    assert apply_overrides(content, overrides, Path("x.json")) == {"a": {"b": 4, "c": {"d": 3}}}
    assert content == {"a": {"b": 1}}
    with pytest.raises(UserError, match=r"a is 1 in x\.json, expected an object"):
        apply_overrides({"a": 1}, [Override.parse("a.b=2")], Path("x.json"))


def test_settings_recipe_and_resolved_config_have_the_values(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in ("model.json", "deepspeed.json")}
    settings = resolve(
        [
            *words,
            *("--set", "mixed_seq_training.24.learning_rate=4e-4", "bert_model_config.hidden_dropout_prob=0.0"),
            *("--set", "zero_optimization.stage=1", "--train_batch_size", "32", "--total_training_steps", "50"),
        ]
    )
    assert settings.training.learning_rate == 4e-4
    assert settings.model_config.hidden_dropout_prob == 0.0
    assert settings.deepspeed.zero_stage == 1
    recipe = settings.recipe()
    assert (recipe["learning_rate"], recipe["total_training_steps"], recipe["batch"]) == (4e-4, 50, 32)
    resolved = json.loads(settings.sources["resolved.json"])
    assert resolved["model"]["mixed_seq_training"]["24"]["learning_rate"] == 4e-4
    assert resolved["deepspeed"]["train_batch_size"] == 32
    assert "zero_optimization.stage=1" in resolved["flags"]["overrides"]
    for name, content in files.items():
        assert settings.sources[name] == content == (tmp_path / name).read_bytes()


def test_the_micro_steps_follow_from_a_batch_size_that_is_set(tmp_path: Path) -> None:
    words = write_project(tmp_path, train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    batch = resolve([*words, "--train_batch_size", "24"], world_size=2).deepspeed.batch
    assert (batch.micro, batch.accumulation, batch.total) == (2, 6, 24)
    batch = resolve([*words, "--set", "train_micro_batch_size_per_gpu=1"], world_size=2).deepspeed.batch
    assert (batch.micro, batch.accumulation, batch.total) == (1, 4, 8)


def test_a_wrong_value_is_reported_with_the_flag_that_set_it(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    message = refusal([*words, "--set", "mixed_seq_training.24.learning_rate=fast", "zero_optimization.stage=7"])
    assert "model.json with --set mixed_seq_training.24.learning_rate=fast: " in message
    assert "learning_rate: found 'fast', expected a number" in message
    assert "deepspeed.json with --set zero_optimization.stage=7: zero_optimization.stage: found 7" in message


def test_a_value_set_twice_is_the_only_problem(tmp_path: Path) -> None:
    words = write_project(tmp_path, train_batch_size=8)
    model = json.loads((tmp_path / "model.json").read_text())
    folders = model["data"].pop("mixed_seq_datasets")["24"]  # which --set gives
    (tmp_path / "model.json").write_text(json.dumps(model))
    given = ["train_batch_size=16", f"data.mixed_seq_datasets.24={json.dumps(folders)}"]
    message = refusal([*words, "--train_batch_size", "8", "--set", *given])
    assert message.startswith("--set train_batch_size=16 and --train_batch_size 8 set the same value"), message


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--batch_size", "pass --train_batch_size N"),
        ("--batch-size", "pass --train_batch_size N"),
        ("--learning-rate", "did you mean '--learning_rate'?"),
        ("--lr", "pass --learning_rate X"),
        ("--num_epochs", "pass --set mixed_seq_training.<max_seq_length>.num_epochs=VALUE"),
        ("--warmup_steps", "warmup_proportion=0.01"),
        ("--hidden_size", "pass --set bert_model_config.hidden_size=VALUE"),
        ("--gradient_clipping", "pass --set gradient_clipping=VALUE"),
        ("--per_device_train_batch_size", "pass --set train_micro_batch_size_per_gpu=N"),
        ("--batch_schedul", "did you mean '--batch_schedule'?"),
    ],
)
def test_a_flag_that_does_not_exist_names_the_right_place(flag: str, words: str) -> None:
    _, problems = read_arguments([flag, "3"])
    assert words in problems.messages[0]
    assert f"unknown flag {flag!r}" in problems.messages[0]

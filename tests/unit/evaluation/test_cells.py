"""Cells: damage is noticed, and whatever changes a result changes the key."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from evaluation.cells import Cell, CellStore
from evaluation.finetuning.finetune import Machine, Setting, deepspeed_settings
from evaluation.finetuning.models import ModelFolder, open_models
from evaluation.tasks.task import choose_tasks
from evaluation.tasks.task_data import TaskData, load_data
from tests.unit.evaluation.tiny import save_model, write_reviews

RESULT = {"scores": {"held_out": {"accuracy": 0.1 + 0.2}}, "losses": [(1, 0.5)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return open_models([(None, save_model(tmp_path_factory.mktemp("cells") / "tiny"))])[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TaskData:
    path = write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv")
    return load_data(choose_tasks([str(path)], {"text": "text", "text_pair": None, "label": "stars"})[0], None)


def test_a_finished_cell_is_read_and_a_damaged_one_counts_as_missing(
    tmp_path: Path, model: ModelFolder, data: TaskData
) -> None:
    cell, store = Cell(model, data, 1, Setting()), CellStore(tmp_path)
    assert store.read(cell) is None
    store.write(cell, RESULT)
    found = store.read(cell)
    assert found is not None
    assert found["scores"] == RESULT["scores"]
    assert store.num_damaged == 0
    whole = store.path_of(cell).read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace("0.5", "0.4"), "[]", '{"key": 1}', ""):
        store.path_of(cell).write_text(damaged)
        assert store.read(cell) is None
    assert store.num_damaged == 5


def test_a_cell_whose_model_was_removed_is_computed_again(tmp_path: Path, model: ModelFolder, data: TaskData) -> None:
    cell, store = Cell(model, data, 1, Setting(), keeps_model=True), CellStore(tmp_path)
    store.write(cell, RESULT)
    assert store.read(cell) is None
    store.model_path(cell).mkdir(parents=True)
    (store.model_path(cell) / "config.json").write_text("{}")
    assert store.read(cell) is not None


def test_the_key_depends_on_all_that_the_result_depends_on(tmp_path: Path, model: ModelFolder, data: TaskData) -> None:
    cell = Cell(model, data, 1, Setting())
    other = open_models([("tiny", save_model(tmp_path / "other", seed=1))])[0]
    changed = [
        replace(cell, seed=2),
        replace(cell, setting=Setting(learning_rate=1e-4)),
        replace(cell, untrained=True),
        replace(cell, model=other),
        replace(cell, purpose="select"),
        replace(cell, start=replace(cell, keeps_model=True)),
        replace(cell, start=replace(cell, data=replace(data, digest="other"))),
        replace(cell, data=replace(data, train=data.train[:50])),
        replace(cell, data=replace(data, digest="other")),
    ]
    assert len({item.key for item in [cell, *changed]}) == 1 + len(changed)
    # Another folder with the same content gives the same result, and so does the other model untrained.
    assert open_models([("again", model.path)])[0].digest == model.digest
    assert replace(cell, untrained=True).key == replace(cell, model=other, untrained=True).key


def test_batches_are_spread_over_ranks_and_micro_steps() -> None:
    assert Machine(2, 4).spread(32) == (4, 4)
    assert Machine(1, None).spread(32) == (32, 1)
    for machine, part in ((Machine(3), "divided among 3"), (Machine(1, 5), "does not divide")):
        with pytest.raises(UserError, match=part):
            machine.spread(32)


def test_a_deepspeed_json_keeps_what_is_not_the_protocols() -> None:
    content = {"train_batch_size": 4096, "optimizer": {"type": "Lamb"}, "bf16": {"enabled": True},
               "zero_optimization": {"stage": 2}}  # fmt: skip
    adapted = deepspeed_settings(content)
    assert adapted["train_batch_size"] == "auto"
    assert adapted["bf16"] == {"enabled": "auto"}
    assert adapted["zero_optimization"] == {"stage": 2}
    assert "optimizer" not in adapted
    assert content["train_batch_size"] == 4096

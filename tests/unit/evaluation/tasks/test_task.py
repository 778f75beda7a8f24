"""Task files: every shipped one is valid, and mistakes in a user's are named."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from evaluation.tasks.task import GROUPS, TASK_FOLDER, choose_tasks, load_task, shipped_tasks

NO_COLUMNS = {"text": None, "text_pair": None, "label": None}
GOOD = {"kind": "classify", "format": "csv", "metrics": ["accuracy"], "train": "a.csv", "dev": "b.csv",
        "columns": {"text": "t", "label": "l"}}  # fmt: skip


def test_every_shipped_task_loads_and_every_group_names_shipped_tasks() -> None:
    expected = {"cola", "sst2", "mrpc", "stsb", "rte", "wnli", "qnli", "qqp", "mnli", "blimp", "conll2003", "squad1",
                "squad2", "agnews", "imdb", "tnews", "afqmc", "ocnli"}  # fmt: skip
    assert set(shipped_tasks()) == expected
    for name in shipped_tasks():
        assert load_task(TASK_FOLDER / f"{name}.json").name == name
    assert {name for group in GROUPS.values() for name in group} <= expected
    assert [task.name for task in choose_tasks(["small", "cola", "blimp"], NO_COLUMNS)] == [*GROUPS["small"], "blimp"]


def test_splits_are_named_only_where_there_are_several() -> None:
    assert load_task(TASK_FOLDER / "mnli.json").split_name("matched") == "mnli/matched"
    assert load_task(TASK_FOLDER / "rte.json").split_name("dev") == "rte"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"metric": ["accuracy"]}, ["unknown key 'metric'", "did you mean 'metrics'"]),
        ({"metrics": ["pearson"]}, ['metric "pearson" does not fit kind "classify"', "accuracy"]),
        ({"columns": {"text": "t"}}, ['"columns" lacks label']),
        ({"columns": {"txt": "t", "label": "l"}}, ['unknown field "txt"', "did you mean 'text'"]),
        ({"kind": "clasify"}, ["kind", "clasify"]),
        ({"train": []}, ['"train" names no file']),
        ({"metrics": ["f1"]}, ['"positive"']),
        ({"max_length": "128"}, ["max_length", "found '128', expected a whole number"]),
    ],
)
def test_mistakes_in_a_task_file_are_named(tmp_path: Path, change: dict[str, object], parts: list[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(UserError) as caught:
        load_task(path)
    assert str(path) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("colla", "did you mean 'cola'"),
        ("nowhere.csv", "no such file; expected an existing one. Correct the path.$"),
        ("x.parquet", "labelled table"),
    ],
)
def test_unknown_words_get_a_hint(word: str, part: str) -> None:
    with pytest.raises(UserError, match=part.replace("'", ".")):
        choose_tasks([word], NO_COLUMNS)


def test_a_table_needs_the_names_of_its_columns(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("text,stars\nfine,5\n")
    with pytest.raises(UserError, match="--text and --label"):
        choose_tasks([str(tmp_path / "reviews.csv")], NO_COLUMNS)

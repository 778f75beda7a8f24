"""Labels, held-out rows, and data that cannot be scored."""

from pathlib import Path

import pytest

from common.errors import UserError
from evaluation.tasks.task import TASK_FOLDER, choose_tasks, load_task
from evaluation.tasks.task_data import load_all, load_data, selection_split

HEADER = "sentence\tlabel\n"


def write_sst2(folder: Path, train: str, dev: str) -> Path:
    (folder / "SST-2").mkdir()
    (folder / "SST-2" / "train.tsv").write_text(HEADER + train)
    (folder / "SST-2" / "dev.tsv").write_text(HEADER + dev)
    return folder


@pytest.mark.parametrize(
    ("dev", "parts"),
    [
        ("a\t1\nb\t2\n", ["dev.tsv, line 3", "unknown label '2'", "expected 0, 1"]),
        ("a\t-1\nb\t-1\n", ["all 2 labels are '-1'", "published without them"]),
        ("a\t1\nb\t1\n", ["every row of dev has the label '1'", "accuracy is undefined"]),
    ],
)
def test_labels_that_cannot_be_scored(tmp_path: Path, dev: str, parts: list[str]) -> None:
    data = write_sst2(tmp_path, "a\t1\nb\t0\n", dev)
    with pytest.raises(UserError) as caught:
        load_data(load_task(TASK_FOLDER / "sst2.json"), data)
    for part in parts:
        assert part in str(caught.value)


def test_missing_data_of_all_tasks_is_reported_at_once(tmp_path: Path) -> None:
    tasks = [load_task(TASK_FOLDER / f"{name}.json") for name in ("rte", "qnli")]
    with pytest.raises(UserError) as caught:
        load_all(tasks, tmp_path)
    assert "task rte: found no data" in str(caught.value)
    assert "task qnli: found no data" in str(caught.value)
    assert "gluebenchmark.com" in str(caught.value)


def test_scores_that_are_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "STS-B").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "STS-B" / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t2.5\nc\td\tnan\n")
    with pytest.raises(UserError, match="line 3: 'nan' is not a number"):
        load_data(load_task(TASK_FOLDER / "stsb.json"), tmp_path)


@pytest.mark.parametrize("labels", ["010101010101", "000000000011"])
def test_a_small_table_holds_out_every_class(labels: str, tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,kind", *[f"text {i},{label}" for i, label in enumerate(labels)]]))
    (task,) = choose_tasks([str(path)], {"text": "text", "text_pair": None, "label": "kind"})
    data = load_data(task, None)
    assert (len(data.train), sorted(row["label"] for row in data.dev["held_out"])) == (10, [0, 1])


def test_a_table_is_split_by_class_and_always_alike(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    rows = [f"text {i},{'rare' if i % 10 == 0 else 'common'}" for i in range(200)]
    path.write_text("\n".join(["text,kind", *rows]))
    (task,) = choose_tasks([str(path)], {"text": "text", "text_pair": None, "label": "kind"})
    data, again = load_data(task, None), load_data(task, None)
    held_out = data.dev["held_out"]
    assert held_out == again.dev["held_out"]
    assert len(held_out) == 20
    assert sum(row["label"] == data.labels.index("rare") for row in held_out) == 2
    assert not {row["text"] for row in held_out} & {row["text"] for row in data.train}
    reduced = selection_split(data)
    assert not {row["text"] for row in reduced.dev["selection"]} & {row["text"] for row in held_out + reduced.train}


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        (["a", "b"] * 10 + [""], r"line 22: has no label \(1 of 21 rows\)"),
        ([str(i / 7) for i in range(40)], "has 40 different values"),
    ],
)
def test_labels_that_are_no_classes(tmp_path: Path, labels: list[str], part: str) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,stars", *(f"t{i},{label}" for i, label in enumerate(labels))]))
    (task,) = choose_tasks([str(path)], {"text": "text", "text_pair": None, "label": "stars"})
    with pytest.raises(UserError, match=part):
        load_data(task, None)


def test_the_digest_follows_the_texts_of_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / split / label).mkdir(parents=True)
            (tmp_path / split / label / "0.txt").write_text("one")
    task = load_task(TASK_FOLDER / "imdb.json")
    before = load_data(task, tmp_path).digest
    assert load_data(task, tmp_path).digest == before
    (tmp_path / "train" / "pos" / "0.txt").write_text("two")  # of the same size
    assert load_data(task, tmp_path).digest != before


def test_tags_without_an_entity_cannot_be_scored(tmp_path: Path) -> None:
    (tmp_path / "eng.train").write_text("the O\ncat B-X\n")
    (tmp_path / "eng.testa").write_text("the O\ncat O\n")
    with pytest.raises(UserError, match=r"no row of dev has an entity \(1 row\), so entity_f1 is undefined"):
        load_data(load_task(TASK_FOLDER / "conll2003.json"), tmp_path)


def test_stars_are_ordered_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,stars", *(f"t{i},{(10, 9, 2)[i % 3]}" for i in range(60))]))
    (task,) = choose_tasks([str(path)], {"text": "text", "text_pair": None, "label": "stars"})
    assert load_data(task, None).labels == ("2", "9", "10")

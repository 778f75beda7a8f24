"""Readers: the oddities of published files."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from evaluation.tasks.readers import read_files, to_bio
from evaluation.tasks.task import Task, make_task
from evaluation.tasks.task_data import load_data

SHIPPED = Path(__file__).resolve().parents[4] / "evaluation" / "tasks"


def shipped(name: str) -> Task:
    return make_task({"name": name, **json.loads((SHIPPED / f"{name}.json").read_text())}, name)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return path


def test_cola_has_no_header_and_quotation_marks_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", 'gj04\t1\t\t"He said so.\ngj04\t0\t*\tHim said\u2028so.\r\n')
    rows = read_files(shipped("cola"), (path,)).rows
    assert [(row["label"], row["text"]) for row in rows] == [("1", '"He said so.'), ("0", "Him said\u2028so.")]


def test_without_a_header_columns_are_numbers_also_in_quotes(tmp_path: Path) -> None:
    changes = {"name": "mine", "kind": "classify", "format": "tsv", "metrics": ["accuracy"], "train": "a", "dev": "a"}
    path = write(tmp_path / "a", "x\t0\tgood\n")
    for text, label, message in (("-1", 1, None), ("sentence", 1, "'text' is column sentence"), (3, 1, "3 columns")):
        task = make_task({**changes, "header": False, "columns": {"text": text, "label": label}}, "mine.json")
        if message is None:
            assert read_files(task, (path,)).rows[0]["text"] == "good"
        else:
            with pytest.raises(UserError, match=message):
                read_files(task, (path,))


def test_mrpc_has_a_byte_order_mark_in_front_of_its_header(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone " a\ttwo\n')
    (row,) = read_files(shipped("mrpc"), (path,)).rows
    assert (row["label"], row["text"], row["text_pair"]) == ("1", 'one " a', "two")


def test_mnli_reads_two_files_and_skips_rows_without_agreement(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
    rows = "0\ta\tb\tx\tneutral\n1\tc\td\tx\t-\n2\te\tf\tx\tentailment\n"
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / "MNLI" / f"{name}.tsv", header + rows)
    data = load_data(shipped("mnli"), tmp_path)
    assert [row["label"] for row in data.dev["matched"]] == [1, 0]
    assert list(data.dev) == ["matched", "mismatched"]
    assert any("skipped 1 row without an agreed label" in note for note in data.notes)


def test_a_few_broken_rows_are_counted_and_many_are_refused(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    good, broken = "1\t2\t3\tq\tr\t0\n1\t2\t3\tq\tr\t1\n", "5\t6\thalf a row\n"
    table = read_files(shipped("qqp"), (write(tmp_path / "a.tsv", header + good * 200 + broken * 2),))
    assert (len(table.rows), table.num_malformed) == (400, 2)
    with pytest.raises(UserError, match="40 of 440 rows do not have the 6 columns"):
        read_files(shipped("qqp"), (write(tmp_path / "b.tsv", header + good * 200 + broken * 40),))


def test_csv_with_quotes_and_long_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", f'"3","A ""title""","{"long " * 40000}"\n"1","b","two\nlines"\n')
    rows = read_files(shipped("agnews"), (path,)).rows
    assert [row["label"] for row in rows] == ["3", "1"]
    assert rows[0]["text"] == 'A "title"'
    assert rows[1]["text_pair"] == "two\nlines"


def test_clue_labels_may_be_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.json", '{"label": 102, "sentence": "新闻"}\n{"label": "103", "sentence": "x"}\n')
    assert [row["label"] for row in read_files(shipped("tnews"), (path,)).rows] == ["102", "103"]


def test_conll_columns_in_iob1_become_bio(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nA B C I-LOC\nD E F B-LOC\n\n\n"
    rows = read_files(shipped("conll2003"), (write(tmp_path / "eng.testa", text),)).rows
    assert [row["tokens"] for row in rows] == [["EU", "rejects"], ["A", "D"]]
    assert [row["label"] for row in rows] == [["B-ORG", "O"], ["B-LOC", "B-LOC"]]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O I-A I-A B-A I-B", "O B-A I-A B-A B-B"),  # IOB1
        ("B-A I-A O B-A", "B-A I-A O B-A"),  # BIO
        ("B-A E-A S-A S-A", "B-A I-A B-A B-A"),  # IOBES
        ("B-A I-A L-A U-B", "B-A I-A I-A B-B"),  # BILOU
    ],
)
def test_every_scheme_of_tags_becomes_bio(tags: str, expected: str) -> None:
    assert to_bio(tags.split()) == expected.split()


def test_squad_keeps_questions_without_an_answer(tmp_path: Path) -> None:
    questions: list[dict[str, Any]] = [
        {"id": "1", "question": " Who?", "answers": [{"text": "Ann", "answer_start": 0}], "is_impossible": False},
        {"id": "2", "question": "Why?", "answers": [], "plausible_answers": [], "is_impossible": True},
    ]
    content = {"version": "v2.0", "data": [{"paragraphs": [{"context": "Ann sat.", "qas": questions}]}]}
    rows = read_files(shipped("squad2"), (write(tmp_path / "dev-v2.0.json", json.dumps(content)),)).rows
    assert [(row["question"], row["answers"]) for row in rows] == [("Who?", [("Ann", 0)]), ("Why?", [])]
    with pytest.raises(UserError, match="does not have SQuAD's layout"):
        read_files(shipped("squad2"), (write(tmp_path / "bad.json", '{"data": [{"context": 1}]}'),))


def test_folders_of_texts_per_label(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for label in ("neg", "pos", "unsup"):
            write(tmp_path / "aclImdb" / part / label / "0_1.txt", f"{label} <br /> text")
    data = load_data(shipped("imdb"), tmp_path)
    assert [(row["text"][:3], row["label"]) for row in data.train] == [("neg", 0), ("pos", 1)]


def test_a_dataset_on_disk_with_named_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"t": datasets.Value("string"), "y": datasets.ClassLabel(names=["no", "yes"])})
    part = datasets.Dataset.from_dict({"t": ["a", "b"], "y": [1, 0]}, features=features)
    datasets.DatasetDict({"train": part, "validation": part}).save_to_disk(tmp_path / "mine")
    content = {"name": "x", "kind": "classify", "format": "dataset", "dataset": "mine", "metrics": ["accuracy"],
               "train": "train", "dev": "validation", "columns": {"text": "t", "label": "y"}}  # fmt: skip
    data = load_data(make_task(content, "x"), tmp_path)
    assert data.labels == ("no", "yes")
    assert [row["label"] for row in data.dev["dev"]] == [1, 0]
    with pytest.raises(UserError, match=r"mine: has no split 'test' \(found train, validation\)"):
        load_data(make_task(content | {"dev": "test"}, "x"), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("sst2", "", "has no rows"),
        ("sst2", "sentence\tlabel\n", "has no rows"),
        ("sst2", "index\tsentence\n0\ta\n", "published without them"),
        ("sst2", "sentence\tlabels\na\t1\n", "did you mean 'labels'"),
        ("cola", "a\tb\n", "has 2 columns, but 'text' is column 3"),
        ("tnews", '{"sentence": "a"}\n', "has no key 'label'"),
        ("tnews", '{"sentence": \n', "line 1: is not valid JSON"),
        ("conll2003", "EU NNP B-NP organisation\n", "'organisation' is not a tag of entities"),
        ("agnews", '"1","a","b\x00"\n"1","a"\n' * 9, "rows do not have the 3 columns"),
    ],
)
def test_unusable_files_are_refused_with_the_reason(tmp_path: Path, name: str, content: str, part: str) -> None:
    path = write(tmp_path / "file", content)
    with pytest.raises(UserError) as caught:
        read_files(shipped(name), (path,))
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes("sentence\tlabel\nd\xe9j\xe0\t1\n".encode("latin1"))
    with pytest.raises(UserError, match=r"is not UTF-8 text .*iconv"):
        read_files(shipped("sst2"), (tmp_path / "x.tsv",))

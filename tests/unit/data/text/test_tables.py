"""Parquet files and Hugging Face datasets: read whole and in parts, damaged, and missing."""

import json
from collections import Counter
from collections.abc import Container
from pathlib import Path

import pytest

from common.errors import UserError
from data.text import sources as sources_module
from data.text.sources import find_sources
from tests.unit.data.reading import DOCUMENTS, documents_of


def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": [" ".join(document) for document in DOCUMENTS]})
    saved.to_parquet(str(tmp_path / "a.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    assert documents_of(tmp_path / "a.parquet") == DOCUMENTS
    assert documents_of(tmp_path / "saved") == DOCUMENTS
    with pytest.raises(UserError, match="--text_field"):
        documents_of(tmp_path / "a.parquet", text_field="body")


def test_json_lines_and_tables_are_cut_for_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"Document number {number} is here." for number in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    table = arrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "groups.parquet", row_group_size=7)
    parquet.write_table(table, tmp_path / "one_group.parquet")
    halves = [datasets.Dataset.from_dict({"text": texts[:20]}), datasets.Dataset.from_dict({"text": texts[20:]})]
    datasets.DatasetDict(train=halves[0], test=halves[1]).save_to_disk(str(tmp_path / "saved"))
    many = range(5, 30)
    expected: dict[int, dict[str, Container[int]]] = {
        1000: {"a.jsonl": [2], "groups.parquet": [2, 3], "one_group.parquet": [2, 3], "saved": [2, 3]},
        150: {"a.jsonl": [14], "groups.parquet": many, "one_group.parquet": many, "saved": many},
        10: {"one_group.parquet": [16], "saved": [50]},  # no more parts than rows, nor than a row group is worth
    }
    for size, parts in expected.items():
        monkeypatch.setattr(sources_module, "RANGE_BYTES", size)
        for name, counts in parts.items():
            found = find_sources([str(tmp_path / name)])
            assert len(found) in counts, name
            assert documents_of(tmp_path / name) == [[text] for text in texts]
            if not name.endswith("jsonl"):
                assert [source.stop for source in found[:-1]] == [source.start for source in found[1:]]
                assert all(0 < source.stop - source.start < 32 for source in found)  # type: ignore[operator]


def test_a_saved_dataset_with_an_empty_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = [[" ".join(DOCUMENTS[0])], [], [" ".join(DOCUMENTS[1])]]
    splits = {f"split{number}": datasets.Dataset.from_dict({"text": texts}) for number, texts in enumerate(parts)}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    splits["split1"].save_to_disk(str(tmp_path / "empty"))
    assert documents_of(tmp_path / "saved") == DOCUMENTS
    assert documents_of(tmp_path / "empty") == []


@pytest.mark.parametrize("state", ["no JSON", "{}", "[]", '{"_data_files": [{}]}'])
def test_a_saved_dataset_that_cannot_be_loaded(state: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["A text."]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"saved: cannot be loaded \(.+\); expected .*save_to_disk.*; save it again"):
        documents_of(tmp_path / "saved")


def test_a_dataset_by_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: object, **__: object) -> object:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"hf:owner/name: cannot be loaded \(Couldn't reach .* Hub\); .*save_to_disk"):
        documents_of("hf:owner/name")


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` accepts a folder in the current one as a name, so no hub is needed."""
    pytest.importorskip("datasets")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(document)}) + "\n" for document in DOCUMENTS)
    )
    monkeypatch.chdir(tmp_path)
    assert documents_of("hf:mine") == DOCUMENTS
    assert documents_of("hf:mine:train") == DOCUMENTS
    with pytest.raises(UserError, match="hf:mine:test: cannot be loaded"):
        documents_of("hf:mine:test")


def test_bad_utf8_in_json_lines_and_in_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    bad = b"One bad \xff byte is here."
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "A good one."}\n{"text": "' + bad + b'"}\n')
    texts = arrow.array([b"A good one.", bad, None], arrow.binary()).view(arrow.string())
    columns = {"plain": texts, "view": texts.cast(arrow.string_view()), "dictionary": texts.dictionary_encode()}
    for name, column in columns.items():
        arrow.parquet.write_table(arrow.table({"text": column}), tmp_path / f"{name}.parquet")
    for name in ("a.jsonl", *(f"{name}.parquet" for name in columns)):
        counts: Counter[str] = Counter()
        assert documents_of(tmp_path / name, counts) == [["A good one."], ["One bad byte is here."]]
        assert counts["records_with_bad_utf8"] == 1
        assert not counts["bad_json_lines"]


def test_junk_and_a_truncated_parquet_file_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": [f"Sentence number {number}." for number in range(5000)]})
    arrow.parquet.write_table(table, tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    flipped = bytearray(whole)
    flipped[200:3000] = bytes(2800)
    misnamed = whole.replace(b"text", b"te\xfft")  # a column name that is not valid UTF-8
    for content in (b"junk", b"", whole[:-100], flipped, misnamed):
        (tmp_path / "a.parquet").write_bytes(content)
        counts: Counter[str] = Counter()
        documents_of(tmp_path / "a.parquet", counts)
        assert counts["files_cut_short"] == 1

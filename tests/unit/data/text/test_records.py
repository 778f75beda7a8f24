"""JSON Lines, JSON arrays, CSV and TSV: which records they have, and which fields are named if one is missing."""

import json
from collections import Counter
from pathlib import Path

import pytest

from common.errors import UserError
from data.text import sources as sources_module
from data.text.documents import check_text_fields
from data.text.records import table_kind
from data.text.sources import find_sources
from tests.unit.data.reading import DOCUMENTS, documents_of

TEXTS = [" ".join(document) for document in DOCUMENTS]
NO_TEXT = "none of these is text; give records with a field of text, in JSON Lines, a JSON array, CSV or TSV"
RECORDS = [{"label": number, "sentence": text} for number, text in enumerate(TEXTS)]


def refusal(path: Path, text_field: str = "text") -> str:
    with pytest.raises(UserError) as error:
        check_text_fields(find_sources([str(path)]), text_field)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert refusal(path) == "no field 'text' in 2 lines; they have 'label', 'sentence'; pass --text_field 'sentence'"
    path.write_text(json.dumps({"id": 1}))
    assert refusal(path) == "no field 'text' in 1 line; it has 'id'; " + NO_TEXT
    path.write_text(json.dumps({"data": RECORDS}))  # records inside a record
    assert refusal(path) == "no field 'text' in 1 line; it has 'data'; " + NO_TEXT
    path.write_text((json.dumps(RECORDS[0]) + "\n") * 3000)
    assert refusal(path).startswith("no field 'text' in the first 1,000 lines;")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS))
    assert refusal(path).startswith("no field 'text' in 2 records;")
    for path, separator in ((tmp_path / "a.csv", ","), (tmp_path / "a.tsv", "\t")):
        path.write_text(f"label{separator}sentence\n1{separator}A long sentence here.\n")
        expected = "has no column 'text'; its first line names 'label', 'sentence'; pass --text_field 'sentence'"
        assert refusal(path) == expected
        check_text_fields(find_sources([str(path)]), "sentence")


def test_records_without_the_field_among_others_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"other": 1}\n{"text": "A b c."}\n')
    check_text_fields(find_sources([str(tmp_path)]), "text")
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path, counts) == [["A b c."]]
    assert counts["records_without_text"] == 1


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("range_bytes", [2**22, 10])
def test_a_json_array_is_read_record_by_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, range_bytes: int
) -> None:
    """Also if it is large, and therefore unpacked first, and if a record is larger than what is parsed at once."""
    monkeypatch.setattr(sources_module, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr("data.text.records._CHUNK", 7)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps([*RECORDS, "no record"], indent=indent, ensure_ascii=False))
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.json", counts, text_field="sentence") == DOCUMENTS
    assert counts["records_without_text"] == 1
    (tmp_path / "b.json").write_text("\n".join(json.dumps(record, indent=indent) for record in RECORDS))
    assert documents_of(tmp_path / "b.json", text_field="sentence") == DOCUMENTS


def test_a_truncated_array_yields_what_came_before(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDS)[:-10])
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.json", counts, text_field="sentence") == DOCUMENTS[:1]
    assert counts["files_cut_short"] == 1


@pytest.mark.parametrize("range_bytes", [2**22, 10])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_is_read_by_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, range_bytes: int
) -> None:
    monkeypatch.setattr(sources_module, "RANGE_BYTES", range_bytes)
    quoted = TEXTS[1].replace(" It", "\n\nIt")  # a field of several lines
    rows = [
        ["id", "text"],
        ["1", f'"{TEXTS[0]}"'],
        ["2", f'"{quoted}"'],
        ["3", '"He said ""yes, but; no"" to it."'],
        ["4"],
    ]
    (tmp_path / "a.csv").write_text("\ufeff" + "\r\n".join(separator.join(row) for row in rows))
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.csv", counts) == [*DOCUMENTS, ['He said "yes, but; no" to it.']]
    assert (counts["records_without_text"], counts["rows_of_another_width"]) == (1, 1)


def test_quotes_in_a_tsv_are_text_unless_its_lines_need_them(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"Inches are 5" or so.\n2\t"All ""of"" it."\n3\tThe "end" of it.\n')
    assert documents_of(tmp_path / "a.tsv") == [['"Inches are 5" or so.'], ['All "of" it.'], ['The "end" of it.']]
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"One line.\nAnother line."\n2\tThe end of it.\n')
    assert documents_of(tmp_path / "a.tsv") == [["One line.", "Another line."], ["The end of it."]]


@pytest.mark.parametrize("name", ["records.txt", "records"])
@pytest.mark.parametrize("as_array", [False, True])
def test_records_are_recognised_without_a_telling_suffix(name: str, as_array: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = "\n".join(json.dumps(record) for record in RECORDS)
    path.write_text(json.dumps(RECORDS) if as_array else lines)
    assert "pass --text_field 'sentence'" in refusal(path)


@pytest.mark.parametrize("name", ["table.txt", "table"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_is_recognised_without_a_telling_suffix(name: str, separator: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = [f'{number}{separator}"{text}"' for number, text in enumerate(TEXTS * 3)]
    path.write_text("\n".join([f"label{separator}sentence", *rows]))
    assert refusal(path).endswith("pass --text_field 'sentence', or --layout sentences if it is not a table")
    (source,) = find_sources([str(path)], "sentences")
    assert source.format == "sentences"


@pytest.mark.parametrize(
    "text",
    [
        "Red, green, blue.\nOne, two, three.\nHe, she, it.\nHere, there, nowhere.\nThe end.\n",
        "the\t900\nof\t300\nand\t200\nto\t100\nin\t50\n",
        "apples,pears\nWe eat apples, pears and plums.\nThey are good.\nSo are plums.\nThe end.\n",
        "Subject\tverb\nA line without it.\nAnother one.\nA third.\nThe end.\n",
    ],
)
def test_text_with_separators_is_not_a_table(text: str) -> None:
    assert table_kind(text) is None

"""The corpus from installed documentation: prose only, each sentence once, nothing imported."""

import csv
import sys
from pathlib import Path

import pytest

from data import corpus
from data.corpus import build_corpus, documents_of_module, drop_repeated, sentences_of

DOCSTRING = """Return the *sum* of two numbers. It uses :func:`operator.add` for that.

Args:
    first (int): The first number that is to be added.
    second: nothing

>>> add(1, 2)
3

==== ====
a    b
==== ====

```
code = that + is + not + prose
```
"""


def test_a_docstring_s_prose_without_markup_code_and_tables() -> None:
    assert sentences_of(DOCSTRING) == [
        "Return the sum of two numbers.",
        "It uses operator.add for that.",
        "The first number that is to be added.",
    ]


def test_modules_are_parsed_and_never_imported(tmp_path: Path) -> None:
    path = tmp_path / "dangerous.py"
    doc = "This module does something when it is imported by someone. " * 4
    path.write_text(
        f'"""{doc}"""\nraise SystemExit("imported")\nclass A:\n    """A class that has its own document here."""\n'
    )
    documents = list(documents_of_module(path))
    assert documents[1] == ["A class that has its own document here."]
    assert "dangerous" not in sys.modules
    broken = tmp_path / "broken.py"
    broken.write_text(f'"""{doc}"""\ndef (:\n')
    assert list(documents_of_module(broken)) == []


def test_a_table_of_texts_and_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for package in ("birds", "stones"):
        for number in range(3):
            files.append(tmp_path / package / f"m{number}.py")
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].write_text(f'"""{f"Module {number} is about the {package} of this country. " * 6}"""\n')
    monkeypatch.setattr(corpus, "find_modules", lambda: files)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert corpus.write_labelled(tmp_path / "table.csv", workers=1) == 6
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["label"] for row in rows] == ["birds"] * 3 + ["stones"] * 3
    assert all(row["label"] in row["text"] and len(row["text"].split()) <= corpus.LABELLED_WORDS for row in rows)


def test_a_sentence_comes_once() -> None:
    found = list(
        drop_repeated(iter([["One is here.", "Two is here."], ["one IS here."], ["Three is here.", "Two is here."]]))
    )
    assert found == [["One is here.", "Two is here."], ["Three is here."]]


def test_the_corpus_is_the_same_for_any_number_of_workers(tmp_path: Path, monkeypatch: object) -> None:
    files = corpus.find_modules()[:150]
    monkeypatch.setattr(corpus, "find_modules", lambda: files)  # type: ignore[attr-defined]
    sizes = [build_corpus(tmp_path / str(workers), 1.0, workers) for workers in (1, 2)]
    assert sizes[0] == sizes[1]
    documents, sentences, size = sizes[0]
    text = "".join(path.read_text() for path in sorted((tmp_path / "1").glob("*.txt")))
    assert text == "".join(path.read_text() for path in sorted((tmp_path / "2").glob("*.txt")))
    assert len(text.encode()) == size > 100_000
    lines = [line for line in text.split("\n") if line]
    assert len(lines) == sentences == len({line.lower() for line in lines})
    assert documents > 20

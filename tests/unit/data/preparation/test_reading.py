"""Documents become pieces with one hash per document, however files and documents are cut."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.preparation.duplicates import DocumentHash
from data.preparation.pipeline import Pipeline
from data.preparation.reading import read_sources
from data.preparation.settings import Settings
from data.preparation.work_folder import Job
from data.text.sources import Source, find_sources


def hash_of(text: str) -> int:
    found = DocumentHash()
    found.update(text)
    return found.result()


def test_one_hash_per_document_and_none_per_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document is of many pieces here, and the others of one each."""
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT", 10)
    monkeypatch.setattr("data.preparation.reading.PIECE_BYTES", 20)
    documents = ["One is here.", "\n".join(f"This is part {number} of it." for number in range(4)), "Three.", "Four."]
    (tmp_path / "a.txt").write_text("\n\n".join(documents * 2))
    job = Job(Settings((32,), (5,), min_document_words=1), str(tmp_path / "work"), "", "")
    result = read_sources(job, 0, [Source(str(tmp_path / "a.txt"), "sentences")])
    hashes = job.folder.load_array("hashes", result["task"])
    assert hashes.tolist() == [hash_of(text) for text in documents * 2]
    assert result["counts"]["documents_cut"] == 6
    assert len(result["pieces"]) > 8
    following = 0
    for name, first, count in result["pieces"]:
        assert len(job.folder.texts(name)) == count
        assert first in (following - 1, following)
        following = first + count
    assert following == 8


def read_all(root: Path, inputs: list[str], layout: str) -> tuple[list[str], Counter[str], int]:
    """The documents in order, with continuations appended; all counts, and the number of continuations in pieces."""
    job = Job(Settings((32,), (5,)), str(root), str(root), str(root / "tokenizer"))
    documents: list[str] = []
    counts: Counter[str] = Counter()
    num_continued = 0
    for result in Pipeline(job, None, 1).read(find_sources(inputs, layout)):
        counts.update(result["counts"])
        before = len(documents)
        for piece, first, count in result["pieces"]:
            texts = job.folder.texts(piece)
            assert len(texts) == count
            if before + first < len(documents):
                documents[-1] += "\n" + texts.pop(0)
                num_continued += 1
            assert before + first + count == len(documents) + len(texts)
            documents += texts
        if result["pieces"]:
            hashes = job.folder.load_array("hashes", result["task"]).tolist()
            assert hashes == [hash_of(text) for text in documents[before:]]
    return documents, counts, num_continued


KINDS = {
    "word": "{}\n",
    "short": "{} is a line.\n",
    "long": "{} is a line of " + "very " * 30 + "many words.\n",
    "junk": "\0\0\n",
}
DOCUMENT = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12)


@settings(max_examples=50)
@given(
    st.lists(st.lists(DOCUMENT, max_size=5), min_size=1, max_size=3),
    st.sampled_from([20, 64, 150, 400]),
    st.sampled_from([50, 300, 2**20]),
    st.sampled_from([60, 2000]),
)
def test_documents_are_the_same_however_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[list[str]]], size: int, largest: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    number = 0
    for name, documents in enumerate(files):
        lines: list[str] = []
        for document in documents:
            for kind in ["short", *document] if "word" in document else document:  # none is too short as a whole
                lines.append(KINDS[kind].format(number))
                number += 1
            lines.append("\n")
        (folder / f"{name}.txt").write_text("".join(lines))
    expected, whole, num_continued = read_all(folder / ".whole", [str(folder)], "sentences")
    assert num_continued == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.text.sources.RANGE_BYTES", size)
        patch.setattr("data.text.documents.MAX_DOCUMENT", largest)
        patch.setattr("data.preparation.reading.PIECE_BYTES", piece)
        found, counts, num_continued = read_all(folder / ".cut", [str(folder)], "sentences")
    assert found == expected
    assert counts["documents"] == whole["documents"]
    assert counts["sentences"] == whole["sentences"]
    assert counts["documents_cut"] >= num_continued


def test_every_file_of_running_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        lines = [f"{name} {number} is a line that\n" + "\n" * (number % 5 == 4) for number in range(100)]
        (tmp_path / f"{name}.txt").write_text("" if name == "b" else "".join(lines))
    monkeypatch.setattr("data.text.sources.RANGE_BYTES", 300)
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT", 100)
    monkeypatch.setattr("data.preparation.reading.PIECE_BYTES", 100)
    documents, counts, num_continued = read_all(tmp_path / ".work", [str(tmp_path)], "running")
    for document, name in zip(documents, ("a", "c"), strict=True):
        assert document.split() == (tmp_path / f"{name}.txt").read_text().split()
    assert counts["documents"] == 2
    assert counts["documents_cut"] == num_continued > 10

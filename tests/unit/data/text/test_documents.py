"""Every format yields the same documents, junk is counted, ranges yield every document once."""

import bz2
import errno
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.text import sources as sources_module
from data.text.documents import read_documents
from data.text.files import read_sample
from data.text.layouts import layout_of
from data.text.lines import MAX_LINE
from data.text.sources import Source, find_sources
from tests.unit.data.reading import DOCUMENTS, LINES, documents_of, whole_documents


def test_one_sentence_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    assert documents_of(tmp_path / "a.txt") == DOCUMENTS


def test_one_paragraph_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(document) for document in DOCUMENTS))
    assert documents_of(tmp_path / "a.txt") == DOCUMENTS


def test_running_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "The first\nsentence stands here. Here\nis the second\none.\n\nAnother document\nbegins. It ends\ntoo.\n"
    )
    assert layout_of(read_sample(str(tmp_path / "a.txt"))) == "running"
    assert documents_of(tmp_path / "a.txt") == [[sentence for document in DOCUMENTS for sentence in document]]


WIKITEXT = """
 = The first title =

 The first sentence stands here . Here is the second one .

 = = A section = =

 It has 4 @,@ 000 words .

 = Another =
 = = = Deep = = =
 It starts = and ends = here .
"""
ARTICLES = [
    ["The first sentence stands here .", "Here is the second one .", "It has 4,000 words ."],
    ["It starts = and ends = here ."],
]


def test_wikitext_is_one_document_per_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(WIKITEXT)
    assert layout_of(read_sample(str(tmp_path / "a.txt"))) == "articles"
    assert documents_of(tmp_path / "a.txt") == ARTICLES
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(WIKITEXT.encode()))
    for size in (1, 10, 64):  # unpacked into parts that end at titles, read from ranges that begin anywhere
        monkeypatch.setattr(sources_module, "RANGE_BYTES", size)
        assert documents_of(tmp_path / "a.txt") == ARTICLES
        assert documents_of(tmp_path / "a.txt.gz") == ARTICLES
    assert layout_of(read_sample(str(tmp_path / "a.txt.gz"))) == "articles"
    (tmp_path / "a.txt").write_text(LINES + "\n = not a title =\n")
    assert layout_of(read_sample(str(tmp_path / "a.txt"))) != "articles"


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstandard.compress)]
)
def test_compressed_files_are_read_directly(tmp_path: Path, suffix: str, compress: object) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(LINES.encode()))  # type: ignore[operator]
    assert documents_of(path) == DOCUMENTS


def test_json_lines(tmp_path: Path) -> None:
    records = [{"body": " ".join(document)} for document in DOCUMENTS]
    content = json.dumps(records[0]) + "\nno json\n[1]\n" + json.dumps({"other": 1}) + "\n" + json.dumps(records[1])
    (tmp_path / "a.jsonl").write_text(content)
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.jsonl", counts, text_field="body") == DOCUMENTS
    assert (counts["bad_json_lines"], counts["records_without_text"]) == (1, 2)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", "a b c.", " \n\t ")))
    assert documents_of(tmp_path / "b.jsonl", counts) == [["a b c."]]
    assert counts["empty_documents"] == 2


def test_a_truncated_archive_yields_what_came_before(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(f"{LINES}\n".encode() * 2000)[:-20])
    documents = documents_of(tmp_path / "b.txt.gz", counts)
    assert documents[:2] == DOCUMENTS
    assert counts["files_cut_short"] == 1


def test_junk_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"A good sentence stands here.\n"
        + b"One bad \xff byte is in this sentence here.\n"
        + bytes(range(256)) * 20
        + b"\n\n\n\n"
        + b"The last sentence.\n"
    )
    counts: Counter[str] = Counter()
    documents = documents_of(path, counts, layout="sentences")
    assert documents == [
        ["A good sentence stands here.", "One bad byte is in this sentence here."],
        ["The last sentence."],
    ]
    assert counts["lines_with_bad_utf8"] >= 2
    assert counts["binary_lines_dropped"] >= 1


def test_a_line_of_many_megabytes_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * (MAX_LINE * 3 // 5) + b"\n\nThe end is here.\n")
    counts: Counter[str] = Counter()
    documents = documents_of(tmp_path / "a.txt", counts, layout="sentences")
    assert documents[-1] == ["The end is here."]
    assert counts["long_lines_cut"] == 2
    assert max(len(sentence) for document in documents for sentence in document) <= 600


@pytest.mark.parametrize("end", [".", " and on"])
def test_a_bracket_that_is_not_closed_loses_no_words(end: str, tmp_path: Path) -> None:
    """The splitter takes all that follows for one sentence, of which a row would hold only the beginning."""
    sentences = [f"This is ({'' if number else '('}number {number} of them){end}" for number in range(2_000)]
    (tmp_path / "a.txt").write_text("\n".join(sentences))
    (document,) = documents_of(tmp_path / "a.txt", layout="running")
    assert " ".join(document).split() == " ".join(sentences).split()
    assert max(map(len, document)) <= 600
    if end == ".":
        assert len(document) == len(sentences)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["a", "b", " ", "\0", "\n", "= a =\n"]), max_size=120).map("".join),
    st.integers(1, 20),
    st.sampled_from([3, 2**20]),
    st.sampled_from(["sentences", "paragraphs", "articles"]),
)
def test_ranges_yield_every_document_once(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, largest: int, layout: str
) -> None:
    """A \\0 is junk: a line of them is neither text nor the end of a document."""
    path = tmp_path_factory.mktemp("ranges") / "a.txt"
    path.write_text(text)
    whole = read_documents(Source(str(path), layout), Counter(), language="en", text_field="")
    expected = [document.sentences for document in whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "RANGE_BYTES", size)
        patch.setattr("data.text.documents.MAX_DOCUMENT", largest)
        assert whole_documents(find_sources([str(path)], layout)) == expected


def test_running_text_is_read_whole_by_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of bounded size that end between sentences, whatever the size of a range."""
    paragraph = "A sentence that\ncontinues in the next line. And\nanother one.\n\n"
    (tmp_path / "a.txt").write_text(paragraph * 50)
    (whole,) = documents_of(tmp_path / "a.txt", layout="running")
    assert len(whole) == 100
    monkeypatch.setattr(sources_module, "RANGE_BYTES", 300)
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT", 200)
    (source,) = find_sources([str(tmp_path / "a.txt")], "running")
    parts = list(read_documents(source, Counter(), language="en", text_field=""))
    assert [sentence for part in parts for sentence in part.sentences] == whole
    assert [part.is_continuation for part in parts] == [False] + [True] * (len(parts) - 1)
    assert len(parts) > 8


MANY = "".join(f"Sentence number {number} stands in this line.\n\n" for number in range(20_000)).encode()


def zstd_with_checksum(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd_with_checksum)]
)
def test_a_damaged_archive_is_counted_whatever_its_kind(tmp_path: Path, suffix: str, compress: object) -> None:
    whole = compress(MANY)  # type: ignore[operator]
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0xFF
    damages = {"cut": whole[: len(whole) // 2], "no end": whole[:-3], "flipped": flipped, "junk": b"junk" * 50}
    for name, content in damages.items():
        path = tmp_path / f"{name}.txt{suffix}"
        path.write_bytes(content)
        counts: Counter[str] = Counter()
        documents = documents_of(path, counts, layout="sentences")
        assert counts["files_cut_short"] == 1, name
        assert len(documents) < 20_000 or name in ("no end", "flipped")
        documents_of(path, Counter())  # detecting the layout must not fail either


def test_archives_of_several_streams(tmp_path: Path) -> None:
    half = LINES.encode()
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstandard.compress)):
        (tmp_path / f"a.txt{suffix}").write_bytes(compress(half + b"\n") + compress(half))  # type: ignore[operator]
        assert documents_of(tmp_path / f"a.txt{suffix}") == DOCUMENTS * 2


def test_a_zst_with_a_window_larger_than_usual(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=29, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(stream.compress(LINES.encode()) + stream.flush())
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.txt.zst", counts) == DOCUMENTS
    assert not counts["files_cut_short"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EMFILE, "Too many open files"),
        TimeoutError("timed out"),
    ],
)
def test_an_error_of_the_system_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(path: str) -> object:
        raise error

    (tmp_path / "a.txt").write_text(LINES)
    source = Source(str(tmp_path / "a.txt"), "sentences")
    monkeypatch.setattr("data.text.documents.open_text", refuse)
    counts: Counter[str] = Counter()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read .*run the same command again"):
        list(read_documents(source, counts, language="en", text_field="text"))
    assert not counts


def test_a_very_long_document_is_yielded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT", 200)
    large = "".join(f"Sentence number {number} stands in this line.\n" for number in range(20))
    (tmp_path / "a.txt").write_text(f"{large}\nA small one.\n\n{large}")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text.replace("\n", " ")}) + "\n" for text in (large, "A small one.", large))
    )
    (tmp_path / "b.txt").write_text(large.replace(" in", "\nin"))
    for source, firsts in (
        (Source(str(tmp_path / "a.txt"), "sentences"), 3),
        (Source(str(tmp_path / "a.txt"), "paragraphs"), 3),
        (Source(str(tmp_path / "a.jsonl"), "jsonl"), 3),
        (Source(str(tmp_path / "b.txt"), "running"), 1),
    ):
        counts: Counter[str] = Counter()
        found = list(read_documents(source, counts, language="en", text_field="text"))
        assert [document.is_continuation for document in found].count(False) == firsts, source
        assert not found[0].is_continuation
        assert found[1].is_continuation
        assert counts["documents_cut"] == len(found) - firsts
        if firsts == 3:
            small = found.index((["A small one."], False))
            assert not found[small + 1].is_continuation
            assert found[small + 2].is_continuation

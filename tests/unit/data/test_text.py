"""Reading: every format gives the same documents, junk is counted, ranges lose nothing."""

import bz2
import errno
import gzip
import json
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import zstandard
from fsspec.spec import AbstractBufferedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import sources as sources_module
from data.layout import layout_of
from data.lines import LONGEST_LINE
from data.sources import Source, describe_sources, detect_layout, find_sources, pack_sources
from data.text import read_documents, unpack
from data.wikitext import Article, plain_text

DOCUMENTS = [
    ["The first sentence stands here.", "Here is the second one."],
    ["Another document begins.", "It ends too."],
]
LINES = "\n\n".join("\n".join(document) for document in DOCUMENTS) + "\n"


def documents_of(path: Path | str, counts: Counter[str] | None = None, **options: str) -> list[list[str]]:
    found = find_sources([str(path)], options.pop("layout", "auto"))
    settings_ = {"language": "en", "text_field": "text", **options}
    counts = Counter() if counts is None else counts
    return [document.sentences for source in found for document in read_documents(source, counts, **settings_)]  # type: ignore[arg-type]


def test_one_sentence_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    assert documents_of(tmp_path / "a.txt") == DOCUMENTS


def test_one_paragraph_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(document) for document in DOCUMENTS))
    assert documents_of(tmp_path / "a.txt") == DOCUMENTS


def test_running_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "The first\nsentence stands here. Here\nis the second\none.\n\nAnother document\nbegins. It ends\ntoo.\n"
    )
    assert detect_layout(str(tmp_path / "a.txt")) == "running"
    assert documents_of(tmp_path / "a.txt") == [[sentence for document in DOCUMENTS for sentence in document]]


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


def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": [" ".join(document) for document in DOCUMENTS]})
    saved.to_parquet(str(tmp_path / "a.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    assert documents_of(tmp_path / "a.parquet") == DOCUMENTS
    assert documents_of(tmp_path / "saved") == DOCUMENTS
    with pytest.raises(UserError, match="--text_field"):
        documents_of(tmp_path / "a.parquet", text_field="body")


WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>A</title><ns>0</ns><revision><text>'''The first''' sentence [[stand|stands]] here.\
&lt;ref name="x"&gt;no&lt;/ref&gt; Here is the [http://x.y second] one.{{cite|{{nested}}}}
== Heading ==
{| class="t"
| cell
|}
[[File:a.png|thumb|A [[link]] inside]]
[[Category:Things]]</text></revision></page>
<page><title>T</title><ns>10</ns><revision><text>template</text></revision></page>
<page><title>R</title><ns>0</ns><revision><text>#REDIRECT [[A]]</text></revision></page>
<page><title>B</title><ns>0</ns><revision><text>Another document begins. It ends too.</text></revision></page>
"""


def test_a_wiki_dump(tmp_path: Path) -> None:
    path = tmp_path / "pages-articles.xml.bz2"
    path.write_bytes(bz2.compress((WIKI + "</mediawiki>").encode()))
    counts: Counter[str] = Counter()
    assert documents_of(path, counts) == DOCUMENTS
    assert counts["pages_that_are_no_articles"] == 2


def test_a_dump_or_archive_that_breaks_off_gives_what_came_before(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(WIKI + "<page><ti")
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.xml", counts) == DOCUMENTS
    assert counts["files_cut_short"] == 1
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(f"{LINES}\n".encode() * 2000)[:-20])
    documents = documents_of(tmp_path / "b.txt.gz", counts)
    assert documents[:2] == DOCUMENTS
    assert counts["files_cut_short"] == 2


RUNAWAYS = {
    "templates": "{{" * 50_000 + "text",
    "links": "[[" * 50_000 + "text",
    "references": "<ref>a " * 50_000,
    "references with names": '<ref name="a">' * 50_000 + "<math>" * 50_000,
    "comments": "<!-- a " * 50_000,
    "tables": "{| a " * 50_000 + "|}",
    "external links": "[//a.b c " * 50_000,
    "brackets": "(" + " " * 100_000 + "x",
    "headings": "=a" + "=" * 100_000 + "x",
    "media": "[[File:a [[b]] " * 30_000,
    "tags": "<a " * 50_000,
    "a number": "&#" + "9" * 100_000 + "; text",
    "quotes": "'" * 100_001,
}


@pytest.mark.parametrize("kind", RUNAWAYS)
def test_wiki_markup_never_runs_away(kind: str) -> None:
    started = time.process_time()
    plain_text(Article(RUNAWAYS[kind]))
    assert time.process_time() - started < 5, "what is quadratic takes minutes"


def test_wiki_markup_that_is_left_open() -> None:
    assert plain_text(Article("{{" * 50_000 + "text")) == ""
    assert plain_text(Article("[[" * 50_000 + "text")).endswith("text")
    assert plain_text(Article("One <ref>two</REF > three <ref name=x /> four <ref>five")) == "One  three  four five"
    assert plain_text(Article("One <!-- two --> three <!-- four")) == "One  three"
    assert plain_text(Article("One ( ; , ) two &#65; &#99999999999;")) == "One  two A"
    assert plain_text(Article("== A ==\nThe text.\n=a= b")) == "The text.\n=a= b"


def test_a_dump_tells_its_namespaces_and_its_redirects(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(
        '<mediawiki><siteinfo><namespaces><namespace key="0" /><namespace key="6">Mynd</namespace>'
        '<namespace key="14">Flokkur</namespace></namespaces></siteinfo>'
        "<page><ns>0</ns><revision><text>The text is here.\n[[Mynd:a.png|thumb|[[no]] text]]\n[[flokkur:Things]]\n"
        "[[Kategorie:Dinge]][[Файл:a.png]] It [[Mynd|ends]] here.</text></revision></page>"
        '<page><ns>0</ns><redirect title="A" /><revision><text>Weiterleitung.</text></revision></page></mediawiki>'
    )
    counts: Counter[str] = Counter()
    (source,) = find_sources([str(tmp_path / "a.xml")])
    (tmp_path / "part").write_bytes(b"".join(item.content for item in unpack(source, counts)))
    for path, kind in (("a.xml", "wiki"), ("part", "wikitext")):
        found = read_documents(Source(str(tmp_path / path), kind), counts, language="en", text_field="text")
        assert [document.sentences for document in found] == [["The text is here.", "It ends here."]]
    assert counts["pages_that_are_no_articles"] == 2


def test_junk_is_survived_and_counted(tmp_path: Path) -> None:
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
    (tmp_path / "a.txt").write_bytes(b"word " * (LONGEST_LINE * 3 // 5) + b"\n\nThe end is here.\n")
    counts: Counter[str] = Counter()
    documents = documents_of(tmp_path / "a.txt", counts, layout="sentences")
    assert documents[-1] == ["The end is here."]
    assert counts["long_lines_cut"] == 2
    assert max(len(sentence) for document in documents for sentence in document) <= 600


@pytest.mark.parametrize("end", [".", " and on"])
def test_a_bracket_that_is_not_closed_loses_no_words(end: str, tmp_path: Path) -> None:
    """The splitter takes all that follows it for one sentence, of which a row would hold the beginning alone."""
    sentences = [f"This is ({'' if number else '('}number {number} of them){end}" for number in range(2_000)]
    (tmp_path / "a.txt").write_text("\n".join(sentences))
    (document,) = documents_of(tmp_path / "a.txt", layout="running")
    assert " ".join(document).split() == " ".join(sentences).split()
    assert max(map(len, document)) <= 600
    if end == ".":
        assert len(document) == len(sentences)


def whole_documents(sources: list[Source]) -> list[list[str]]:
    """Parts put together again: one that goes on belongs to the document before it, unless that has ended."""
    documents: list[list[str]] = []
    is_open = False
    for source in sources:
        for part in read_documents(source, Counter(), language="en", text_field=""):
            if part.goes_on and is_open:
                documents[-1].extend(part.sentences)
            else:
                documents.append(list(part.sentences))
            is_open = not part.ends
    return documents


@settings(max_examples=300)
@given(
    st.text(alphabet="ab \0\n", max_size=120),
    st.integers(1, 20),
    st.sampled_from([3, 2**20]),
    st.sampled_from(["sentences", "paragraphs"]),
)
def test_ranges_share_nothing_and_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, largest: int, layout: str
) -> None:
    """A \\0 is junk: a line of them is no text and no end of a document either."""
    path = tmp_path_factory.mktemp("ranges") / "a.txt"
    path.write_text(text)
    whole = read_documents(Source(str(path), layout), Counter(), language="en", text_field="")
    expected = [document.sentences for document in whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "RANGE_BYTES", size)
        patch.setattr("data.text.LARGEST_DOCUMENT", largest)
        assert whole_documents(find_sources([str(path)], layout)) == expected


@settings(max_examples=200)
@given(st.text(alphabet="ab. \0\n", max_size=120), st.integers(1, 20), st.sampled_from([3, 2**20]))
def test_ranges_of_running_text_are_one_document(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, largest: int
) -> None:
    """Its words are the same and in order; a sentence may be cut where a range or a part without a blank line ends."""
    path = tmp_path_factory.mktemp("running") / "a.txt"
    path.write_text(text)
    (source,) = find_sources([str(path)], "running")
    expected = whole_documents([source])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "RANGE_BYTES", size)
        patch.setattr("data.text.LARGEST_DOCUMENT", largest)
        found = whole_documents(find_sources([str(path)], "running"))
    assert [" ".join(document).split() for document in found] == [" ".join(document).split() for document in expected]


def test_running_text_is_cut_between_paragraphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paragraph = "A sentence that\ngoes on in the next line. And\nanother one.\n\n"
    (tmp_path / "a.txt").write_text(paragraph * 50)
    (whole,) = documents_of(tmp_path / "a.txt", layout="running")
    monkeypatch.setattr(sources_module, "RANGE_BYTES", 300)
    sources = find_sources([str(tmp_path / "a.txt")], "running")
    parts = [list(read_documents(source, Counter(), language="en", text_field="")) for source in sources]
    assert len(parts) == -(-len(paragraph) * 50 // 300)
    assert all(len(part) == 1 for part in parts[:-1])
    assert [sentence for part in parts for document in part for sentence in document.sentences] == whole
    assert [document.goes_on for part in parts for document in part][:3] == [False, True, True]


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


def test_many_small_files_are_read_by_few_tasks(tmp_path: Path) -> None:
    for number in range(2500):
        (tmp_path / f"{number:04d}.txt").touch()
    found = find_sources([str(tmp_path)])
    packs = list(pack_sources(found))
    assert [len(pack) for pack in packs] == [1000, 1000, 500]
    assert [source for pack in packs for source in pack] == found
    large = [Source("a", "sentences", size=sources_module.RANGE_BYTES), Source("b", "hf"), Source("c", "wiki", size=1)]
    assert [len(pack) for pack in pack_sources(large)] == [1, 1, 1]


def test_hidden_folders_and_what_the_command_writes_are_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", ".git/config", "sub/.work/text", "sub/b.txt", "out/128/report.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LINES)
    found = find_sources([str(tmp_path)], leave_out=[str(tmp_path / "out")])
    assert [source.path for source in found] == [f"{tmp_path}/a.txt", f"{tmp_path}/sub/b.txt"]
    found = find_sources([f"file://{tmp_path}"], leave_out=[f"file://{tmp_path}/out"])
    assert [source.path for source in found] == [f"file://{tmp_path}/a.txt", f"file://{tmp_path}/sub/b.txt"]
    assert len(find_sources([str(tmp_path / ".git")])) == 1, "a hidden folder that is named is meant"


def test_changed_input_is_another_input(tmp_path: Path) -> None:
    memory = sources_module.fsspec.filesystem("memory")
    memory.pipe("/changing/a.txt", LINES.encode())
    urls = find_sources(["memory://changing"])
    before = describe_sources(urls)
    assert describe_sources(urls) == before
    memory.pipe("/changing/a.txt", LINES.encode() + b"more")
    assert describe_sources(urls) != before
    datasets = pytest.importorskip("datasets")
    seen = []
    for text in ("One.", "Two."):
        datasets.Dataset.from_dict({"text": [text]}).save_to_disk(str(tmp_path / "saved"))
        seen.append(describe_sources(find_sources([str(tmp_path / "saved")])))
    assert seen[0] != seen[1]


def test_suffixes_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "B.JSONL").write_text(json.dumps({"text": " ".join(DOCUMENTS[0])}))
    assert documents_of(tmp_path) == [*DOCUMENTS, DOCUMENTS[0]]


SCRIPTS = {
    "Chinese": ["今天天气很好。", "我们去公园散步吧！", "你想去哪里？"],
    "Japanese": ["今日は天気がいいです。", "「行きましょう。」", "どこへ行きますか？"],
    "Hindi": ["आज मौसम अच्छा है।", "हम बाग में चलते हैं।", "क्या तुम आओगे?"],
    "Urdu": ["آج موسم اچھا ہے۔", "ہم باغ میں چلتے ہیں۔", "کیا آپ آئیں گے؟"],
    "Russian": ["Сегодня хорошая погода.", "Мы идём в парк.", "Ты пойдёшь?"],
    "Armenian": ["Այսօր լավ եղանակ է։", "Մենք գնում ենք այգի։", "Դու կգա՞ս։"],
    "English": ["The weather is good, e.g. it is warm.", "We go to the park (at 3 p.m. today).", '"Will you come?"'],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_layout_is_found_in_any_script(script: str) -> None:
    sentences = SCRIPTS[script] * 3
    joint = "" if script in ("Chinese", "Japanese") else " "
    assert layout_of("\n".join(sentences)) == "sentences"
    assert layout_of("\n\n".join([joint.join(sentences)] * 3)) == "paragraphs"
    running = joint.join(sentences)
    assert layout_of("\n".join(running[i : i + 5] for i in range(0, len(running), 5))) == "running"


def test_folders_globs_and_urls(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", ".hidden"):
        (tmp_path / name).write_text(LINES)
    assert len(documents_of(tmp_path)) == 4
    assert len(documents_of(f"{tmp_path}/b*")) == 2
    assert documents_of(f"file://{tmp_path}/a.txt") == DOCUMENTS
    memory = sources_module.fsspec.filesystem("memory")
    memory.pipe("/corpus/a.txt.gz", gzip.compress(LINES.encode()))
    assert documents_of("memory://corpus") == DOCUMENTS
    with pytest.raises(UserError, match="no file found"):
        documents_of(tmp_path / "absent")


class Remote(fsspec.AbstractFileSystem):
    """Files as an object store has them: with ranges of bytes on request, and a `readline` without a limit."""

    protocol = "remote"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}

    def info(self, path: str, **_: object) -> dict[str, object]:
        return {"name": path, "type": "file", "size": self.size(path)}

    def size(self, path: str) -> int | None:
        return len(self.files[path])

    def find(self, path: str, *_: object, **__: object) -> list[str]:  # type: ignore[override]
        return sorted(name for name in self.files if name.startswith(path))

    def _open(self, path: str, mode: str = "rb", **_: object) -> AbstractBufferedFile:
        return AbstractBufferedFile(self, path, mode, block_size=100, size=len(self.files[path]))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        return self.files[path][start:end]


class StreamedFile(AbstractBufferedFile):
    def seek(self, loc: int, whence: int = 0) -> int:
        raise ValueError("cannot seek")


class Streamed(Remote):
    protocol = "streamed"

    def _open(self, path: str, mode: str = "rb", **_: object) -> AbstractBufferedFile:
        return StreamedFile(self, path, mode, block_size=100, size=len(self.files[path]))


class Unsized(Remote):
    protocol = "unsized"

    def size(self, path: str) -> int | None:
        return None


@pytest.mark.parametrize(("system", "num_sources"), [(Remote, 14), (Streamed, 1), (Unsized, 1)])
def test_urls_are_cut_and_packed_where_the_file_system_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: type[Remote], num_sources: int
) -> None:
    monkeypatch.setattr(sources_module, "RANGE_BYTES", 600)
    fsspec.register_implementation(str(system.protocol), system, clobber=True)
    text = "".join(f"Sentence number {number} is here.\n" + "\n" * (number % 3 == 0) for number in range(400))[:8000]
    (tmp_path / "a.txt").write_text(text)
    small = {f"small/{number:03d}.txt": LINES.encode() for number in range(40)}
    monkeypatch.setattr(Remote, "files", {"a.txt": text.encode(), **small})
    for layout in ("sentences", "running"):
        found = find_sources([f"{system.protocol}://a.txt"], layout)
        assert len(found) == num_sources
        assert whole_documents(found) == whole_documents(find_sources([str(tmp_path / "a.txt")], layout))
    packs = list(pack_sources(find_sources([f"{system.protocol}://small"], "sentences")))
    assert len(packs) == (40 if system is Unsized else -(-40 // (600 // len(LINES))))


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
        documents_of(path, Counter())  # finding the layout survives it as well


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
def test_what_the_system_refuses_is_no_short_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(path: str) -> object:
        raise error

    (tmp_path / "a.txt").write_text(LINES)
    source = Source(str(tmp_path / "a.txt"), "sentences")
    monkeypatch.setattr("data.text.open_source", refuse)
    counts: Counter[str] = Counter()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read .*run the same command again"):
        list(read_documents(source, counts, language="en", text_field="text"))
    assert not counts


def test_a_dataset_by_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: object, **__: object) -> object:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"hf:owner/name: cannot be loaded \(Couldn't reach .* Hub\); .*save_to_disk"):
        documents_of("hf:owner/name")


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder of the current one for a name, so no hub is needed."""
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
    arrow.parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
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
    for content in (b"junk", b"", whole[:-100], flipped):
        (tmp_path / "a.parquet").write_bytes(content)
        counts: Counter[str] = Counter()
        documents_of(tmp_path / "a.parquet", counts)
        assert counts["files_cut_short"] == 1


def test_the_parts_of_a_very_large_document_are_known_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.LARGEST_DOCUMENT", 200)
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
        assert [document.goes_on for document in found].count(False) == firsts, source
        assert not found[0].goes_on
        assert found[1].goes_on
        assert counts["documents_cut"] == len(found) - firsts
        if firsts == 3:
            small = found.index((["A small one."], False, True))
            assert not found[small + 1].goes_on
            assert found[small + 2].goes_on

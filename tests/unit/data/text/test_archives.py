"""Archives are opened as folders, UTF-16 and HTML are recognised, and nothing else is taken for text."""

import bz2
import gzip
import io
import random
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from common.errors import UserError
from data.text import sources as sources_module
from data.text.files import extract, open_text
from data.text.html_pages import html_text
from data.text.sources import find_extracted, find_sources
from tests.unit.data.reading import DOCUMENTS, LINES, documents_of

FILES = {
    "top.txt": LINES.encode(),
    "sub/b.csv": b"id,text\n1,A row of words.\n",
    "../up.txt": b"It must not leave the folder.\n",
    ".hidden.txt": b"No.",
    "__MACOSX/x.txt": b"No.",
}


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("sub")
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVES = {
    "a.zip": zip_of(FILES),
    "a.tar": tar_of(FILES),
    "a.tar.gz": gzip.compress(tar_of(FILES)),
    "a.tgz": gzip.compress(tar_of(FILES)),
    "a.tar.bz2": bz2.compress(tar_of(FILES)),
    "a.tar.zst": zstandard.compress(tar_of(FILES)),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_opened_as_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ARCHIVES[name])
    (source,) = find_sources([str(tmp_path)])
    assert source.format == "archive"
    counts: Counter[str] = Counter()
    files = extract(source.path, tmp_path / "out", counts)
    assert [name for _, name in files if name != "../up.txt"] == ["top.txt", "sub/b.csv"]
    assert all(Path(path).parent == tmp_path / "out" for path, _ in files)
    found = find_extracted(source.path, [path for path, _ in files], "auto")
    assert [source.format for source in found][:2] == ["sentences", "csv"]
    assert documents_of(found[0].path) == DOCUMENTS
    assert not counts
    assert extract(source.path, tmp_path / "out", counts) == files, "a task that was killed is repeated"


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_of_a_truncated_archive_the_files_before_are_read(tmp_path: Path, name: str) -> None:
    whole = (zip_of if name == "a.zip" else tar_of)({"a.txt": LINES.encode(), "b.txt": bytes(range(256)) * 99})
    whole = gzip.compress(whole) if name.endswith("gz") else whole
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    counts: Counter[str] = Counter()
    extract(str(tmp_path / name), tmp_path / "out", counts)
    assert counts["files_cut_short"] == 1


def test_an_archive_inside_an_archive_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = {"deep/inner.zip": zip_of(FILES), "second.tar.gz": gzip.compress(tar_of(FILES))}
    for files in ({"a.txt": LINES.encode(), **inner}, inner):
        (tmp_path / "outer.zip").write_bytes(zip_of(files))
        extracted = [path for path, _ in extract(str(tmp_path / "outer.zip"), tmp_path / "out", Counter())]
        if files is inner:
            with pytest.raises(UserError, match=r"not opened \(2 archives: inner.zip, second.tar.gz\); expected files"):
                find_extracted("outer.zip", extracted, "auto")
        else:
            assert len(find_extracted("outer.zip", extracted, "auto")) == 1
            assert "outer.zip: an archive inside an archive is not opened (2 archives" in capsys.readouterr().err


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    content = bytearray(zip_of({"a.txt": LINES.encode()}))
    content[content.rindex(b"PK\x01\x02", 0, content.rindex(b"a.txt")) + 8] |= 1  # the flag in the directory
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.txt is encrypted; expected .* extract it"):
        extract(str(tmp_path / "a.zip"), tmp_path / "out", Counter())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_utf_16_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str) -> None:
    """Also with a range size below that of the file: it can only be converted from the beginning."""
    if encoding == "utf-16-be":
        monkeypatch.setattr(sources_module, "RANGE_BYTES", 20)
    text = LINES.replace("stands", "stānds 😀").encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    counts: Counter[str] = Counter()
    found = documents_of(tmp_path / name, counts)
    assert found == [[line.replace("stands", "stānds 😀") for line in document] for document in DOCUMENTS]
    assert not any(counts.values())


SCRIPTS = {
    "ru": "Дом стоит у реки. Он старый,\nи в нём никто не живёт.\n",
    "el": "Το σπίτι είναι κοντά στο ποτάμι. Είναι παλιό.\n",
    "ar": "البيت قريب من النهر. وهو قديم جدا.\n",
    "hi": "घर नदी के पास है। वह पुराना है।\n",
    "zh": "房子在河边。它很旧，没有人住在里面。窗户都关着，花园里长满了草。",
    "ja": "家は川のそばにあります。とても古くて、だれも住んでいません。庭には草がたくさん生えています。",
    "ko": "집은 강가에 있다. 아주 오래되어 아무도 살지 않는다.\n",
    "th": "บ้านอยู่ใกล้แม่น้ำ มันเก่ามาก\n",
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("language", SCRIPTS)
def test_utf_16_of_any_script_is_recognised_without_a_mark(tmp_path: Path, language: str, encoding: str) -> None:
    text = SCRIPTS[language] * 99
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with open_text(str(tmp_path / "a.txt")) as stream:
        assert stream.read().decode() == text


@pytest.mark.parametrize(
    "content",
    [
        *(text.encode() * 20 for text in SCRIPTS.values()),
        SCRIPTS["ru"].encode("koi8-r") * 20,
        SCRIPTS["zh"].encode("gb18030") * 20,
        SCRIPTS["ja"].encode("shift-jis") * 20,
        "Das Gebäude ist älter als der Fluß daneben.\n".encode("latin-1") * 20,
        LINES.encode().replace(b"\n", b"\n\0"),
        bytes(range(256)) * 8,
        random.Random(1).randbytes(4096),
    ],
)
def test_other_bytes_are_not_taken_for_utf_16(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with open_text(str(tmp_path / "a.txt")) as stream:
        assert stream.read() == content


PAGE = """<!-- saved --><!DOCTYPE html><html><head><title>No</title><meta charset="{}"><style>p {{}}</style></head>
<body><nav><ul><li>Home</li></ul></nav><script>if (a < b) {{ text }}</script>
<h1>The heading</h1><p>One <b>bold</b> sentence
of the café. Fish &amp; chips.<p>Another paragraph.<br>A line.<footer>No</footer></body></html>"""


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
@pytest.mark.parametrize("name", ["a.html", "a.txt"])
def test_html_is_cleaned(tmp_path: Path, charset: str, name: str) -> None:
    (tmp_path / name).write_bytes(PAGE.format(charset).encode(charset))
    expected = ["The heading", "One bold sentence of the café.", "Fish & chips.", "Another paragraph.", "A line."]
    assert [source.format for source in find_sources([str(tmp_path)])] == ["html"]
    assert documents_of(tmp_path / name) == [expected]


def test_html_with_elements_left_open() -> None:
    assert html_text(b"<head><title>No<body><p>Some text<svg><path></svg> and more") == "Some text and more"


def test_files_that_are_not_text_are_skipped_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.png", "c.PDF"):
        (tmp_path / name).write_text(LINES)
    assert [Path(source.path).name for source in find_sources([str(tmp_path)])] == ["a.txt"]
    assert "2 files skipped as not text, such as b.png" in capsys.readouterr().err

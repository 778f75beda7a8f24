"""Which sources are found in files, folders, globs and URLs, in which layout, and how they are cut."""

import gzip
import json
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile

from common.errors import UserError
from data.text import sources as sources_module
from data.text.layouts import layout_of
from data.text.sources import Source, describe_sources, find_sources, pack_sources
from tests.unit.data.reading import DOCUMENTS, LINES, documents_of, whole_documents


def test_many_small_files_are_read_by_few_tasks(tmp_path: Path) -> None:
    for number in range(2500):
        (tmp_path / f"{number:04d}.txt").touch()
    found = find_sources([str(tmp_path)])
    packs = list(pack_sources(found))
    assert [len(pack) for pack in packs] == [1000, 1000, 500]
    assert [source for pack in packs for source in pack] == found
    large = [Source("a", "sentences", size=sources_module.RANGE_BYTES), Source("b", "hf"), Source("c", "wiki", size=1)]
    assert [len(pack) for pack in pack_sources(large)] == [1, 1, 1]


def test_hidden_folders_and_output_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".git/config", "sub/.work/text", "sub/b.txt", "out/128/report.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LINES)
    found = find_sources([str(tmp_path)], leave_out=[str(tmp_path / "out")])
    assert [source.path for source in found] == [f"{tmp_path}/a.txt", f"{tmp_path}/sub/b.txt"]
    found = find_sources([f"file://{tmp_path}"], leave_out=[f"file://{tmp_path}/out"])
    assert [source.path for source in found] == [f"file://{tmp_path}/a.txt", f"file://{tmp_path}/sub/b.txt"]
    assert len(find_sources([str(tmp_path / ".git")])) == 1, "a hidden folder that is named explicitly is read"


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
    with pytest.raises(UserError, match="absent: no such file or folder; give files"):
        documents_of(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    for given in (tmp_path / "empty", f"{tmp_path}/c*", "memory://absent"):
        with pytest.raises(UserError, match="no file found there"):
            documents_of(given)


class Remote(fsspec.AbstractFileSystem):
    """Files as in an object store: byte ranges on request, and a `readline` without a limit."""

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
        assert len(found) == (num_sources if layout == "sentences" else 1)
        assert whole_documents(found) == whole_documents(find_sources([str(tmp_path / "a.txt")], layout))
    packs = list(pack_sources(find_sources([f"{system.protocol}://small"], "sentences")))
    assert len(packs) == (40 if system is Unsized else -(-40 // (600 // len(LINES))))

"""Text in many forms through the command: what each file was read as is in the report, with a sample."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.prepare.corpora import run, write_corpus


def test_the_report_has_what_each_file_was_read_as(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "in"
    texts.mkdir()
    lines = write_corpus(texts / "a.txt", 40).read_text()
    (texts / "b.txt").write_text(lines.replace("walk", "sing"), encoding="utf-16")
    (texts / "c.json").write_text(json.dumps([{"text": "An array | of records. It has two."}]))
    (texts / "d.csv").write_text("id,text\n1,A row of a table.\n")
    (texts / "e.html").write_text("<html><body><p>A page of words.</p></body></html>")
    with zipfile.ZipFile(texts / "f.zip", "w") as archive:
        archive.writestr("deep/g.jsonl", '{"text": "A line in an archive."}\n')
        archive.writestr("picture.png", b"\x89PNG")
    with tarfile.open(texts / "h.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("i.txt.gz")
        packed = gzip.compress(lines.replace("jump", "swim").encode())
        info.size = len(packed)
        tar.addfile(info, io.BytesIO(packed))
    run(texts, tmp_path / "out")
    folder = tmp_path / "out" / "32"
    report = json.loads((folder / "report.json").read_text())
    found = {file["file"].removeprefix(f"{texts}/"): (file["read_as"], file["sample"]) for file in report["inputs"]}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "a.txt": "sentences",
        "b.txt": "sentences",
        "c.json": "json",
        "d.csv": "csv",
        "e.html": "html",
        "f.zip/deep/g.jsonl": "jsonl",
        "h.tar.gz/i.txt.gz": "sentences",
    }
    assert found["f.zip/deep/g.jsonl"][1] == "A line in an archive."
    assert found["b.txt"][1][:20] == lines.replace("walk", "sing")[:20]
    assert "e.html | html | A page of words. |" in (folder / "report.md").read_text()
    assert "c.json | json | An array \\| of records. It has two. |" in (folder / "report.md").read_text()
    assert report["preparation"]["documents"] == 3 * 40 + 4
    output = capsys.readouterr()
    assert "7 files, read as sentences (2), json (1), csv (1), html (1), archive (2)" in output.out
    assert "2 archives: 2 files, read as jsonl (1), sentences (1)" in output.out
    assert "f.zip: 1 file skipped as not text" in output.err

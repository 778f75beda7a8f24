"""The same bytes for any number of workers, and from archives, tables, URLs and a cluster."""

import bz2
import gzip
import hashlib
import json
import random
from pathlib import Path

import pytest
import zstandard

from common.errors import UserError
from data.text import sources
from tests.integration.prepare.corpora import WORDS, digests, run, write_one_document


def test_the_same_bytes_whatever_the_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "one")
    run(corpus, tmp_path / "two", "--workers", "2")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(list((tmp_path / "one" / "32").glob("training*"))) > 2
    run(corpus, tmp_path / "other", "--seed", "7")
    assert digests(tmp_path / "other") != digests(tmp_path / "one")


@pytest.mark.parametrize("layout", ["running", "sentences"])
def test_one_large_document_gives_the_same_bytes(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task reads it into many pieces; it is counted as one document and belongs to one split."""
    monkeypatch.setattr(sources, "RANGE_BYTES", 4 * 2**20)  # that of worker processes
    (tmp_path / "in").mkdir()
    write_one_document(tmp_path / "in" / "a.txt", layout, megabytes=9)
    small = [json.dumps({"text": f"Document {number} stands here. It is one of many."}) for number in range(700)]
    (tmp_path / "in" / "0.jsonl").write_text("\n".join(small))
    for workers in ("1", "3"):
        run(tmp_path / "in", tmp_path / workers, "--layout", layout, "--workers", workers, "--keep_work")
    assert digests(tmp_path / "1") == digests(tmp_path / "3")
    done = tmp_path / "3" / ".work" / "done"
    read = [json.loads(result.read_text()) for result in sorted(done.glob("reading.*"))]
    assert [len(result["pieces"]) > 3 for result in read if result["counts"].get("documents") == 1] == [True]
    counts = json.loads((tmp_path / "3" / "32" / "report.json").read_text())["preparation"]
    assert counts["documents"] == 701
    encoded = sorted(done.glob("encoding.*"))[1:]
    splits = [json.loads(result.read_text())["splits"] for result in encoded]
    found = {(name, part["sole_key"]) for split in splits for name, part in split.items() if part["documents"]}
    assert len(encoded) > 3
    assert len(found) == 1
    assert None not in {key for _, key in found}


def test_a_wiki_dump_is_cleaned_by_many_workers(tmp_path: Path) -> None:
    rng = random.Random(0)
    pages = [
        f"<page><ns>0</ns><revision><text>''{number}'' {' '.join(rng.choices(WORDS, k=60))}. [[a|Then]] "
        f"{' '.join(rng.choices(WORDS, k=20))}.</text></revision></page>"
        for number in range(400)
    ]
    dump = tmp_path / "pages-articles.xml.bz2"
    dump.write_bytes(bz2.compress(f"<mediawiki>{''.join(pages)}</mediawiki>".encode()))
    for workers in ("1", "2"):
        run(dump, tmp_path / workers, "--workers", workers)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    counts = json.loads((tmp_path / "1" / "32" / "report.json").read_text())["preparation"]
    assert counts["documents"] == 400
    assert counts["sentences"] == 800


def test_a_large_archive_is_cleaned_by_many_workers(corpus: Path, tmp_path: Path) -> None:
    """One worker unpacks it into parts that end between documents."""
    text, archives = corpus.read_text(), tmp_path / "in"
    archives.mkdir()
    (archives / "a.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    records = "".join(json.dumps({"text": document}) + "\n" for document in text.strip().split("\n\n"))
    (archives / "a.jsonl.zst").write_bytes(zstandard.compress(records.encode()))
    run(archives, tmp_path / "one", "--keep_work")
    run(archives, tmp_path / "two", "--workers", "2")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(list((tmp_path / "one" / ".work" / "raw").iterdir())) > 4
    counts = json.loads((tmp_path / "one" / "32" / "report.json").read_text())["preparation"]
    assert counts["documents"] == 3000
    assert counts["duplicates"] == 1500
    assert (counts["files_of_sentences"], counts["files_of_jsonl"]) == (1, 1)


@pytest.mark.parametrize("layout", ["running", "sentences"])
def test_an_archive_that_is_one_document_gives_the_same_bytes_as_the_plain_file(tmp_path: Path, layout: str) -> None:
    plain = write_one_document(tmp_path / "a.txt", layout)
    archive = tmp_path / "a.txt.gz"
    archive.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    run(plain, tmp_path / "plain", "--validation_share", "0")
    for workers in ("1", "2"):
        run(archive, tmp_path / workers, "--validation_share", "0", "--workers", workers)
        assert digests(tmp_path / workers) == digests(tmp_path / "plain")


def test_tables_and_datasets_are_read_by_many_tasks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file of one row group, a saved dataset, and a dataset by name with two files."""
    datasets = pytest.importorskip("datasets")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts = corpus.read_text().strip().split("\n\n")
    parquet.write_table(arrow.table({"text": texts[:500]}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": texts[500:1000]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "mine").mkdir()
    for name, part in (("a", texts[1000:1250]), ("b", texts[1250:])):
        lines = [json.dumps({"text": text}) for text in [*part, None, "", " \n\t "]]
        (tmp_path / "mine" / f"train-{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)  # where `datasets` accepts a folder as a name
    monkeypatch.setattr(sources, "RANGE_BYTES", 50_000)
    names = ["a.parquet", "saved", "hf:mine"]
    for workers in ("1", "2"):
        run("", tmp_path / workers, "--input", *names, "--workers", workers, "--keep_work")
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    done = tmp_path / "2" / ".work" / "done"
    assert len(list(done.glob("unpacking.*"))) == 2, "a task for each file of the dataset by name"
    read = [json.loads(path.read_text())["counts"] for path in sorted(done.glob("reading.*"))]
    assert len(read) > 9
    assert max(counts["documents"] for counts in read) < 250
    counts = json.loads((tmp_path / "2" / "32" / "report.json").read_text())["preparation"]
    assert (counts["documents"], counts["duplicates"], counts["records_without_text"]) == (1500, 0, 2)
    assert counts["empty_documents"] == 4
    assert "| empty documents | 4 |" in (tmp_path / "2" / "32" / "report.md").read_text()


def test_input_from_a_url_with_two_workers(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(corpus.read_text().split("\n\n")[:400]):
        (tmp_path / "in" / f"{number:03d}.txt").write_text(text)
    run(tmp_path / "in", tmp_path / "here", "--layout", "sentences")
    run(f"file://{tmp_path}/in", tmp_path / "there", "--layout", "sentences", "--workers", "2")
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    counts = [json.loads((tmp_path / place / "32" / "report.json").read_text()) for place in ("here", "there")]
    assert counts[0]["preparation"]["documents"] == counts[1]["preparation"]["documents"] == 400


def test_output_to_a_url(corpus: Path, tmp_path: Path) -> None:
    import fsspec

    run(corpus, tmp_path / "local")
    run(corpus, "memory://prepared", "--work_dir", str(tmp_path / "work"))
    memory = fsspec.filesystem("memory")
    for name, digest in digests(tmp_path / "local").items():
        assert hashlib.sha256(memory.cat_file(f"/prepared/{name}")).hexdigest() == digest
    here, there = (
        json.loads(text)["splits"]
        for text in ((tmp_path / "local/32/report.json").read_text(), memory.cat_file("/prepared/32/report.json"))
    )
    assert [split["rows"] for split in there] == [split["rows"] for split in here]
    assert [split["folder"] for split in there] == ["memory://prepared/32"] * 2
    assert there[0]["fill"] == pytest.approx(here[0]["fill"], rel=0.02)
    assert memory.cat_file("/prepared/32/lengths.svg").startswith(b"<svg")
    with pytest.raises(UserError, match="--work_dir"):
        run(corpus, "memory://elsewhere")


def test_a_dask_cluster_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    run(corpus, tmp_path / "here")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as cluster:
        run(corpus, tmp_path / "there", "--executor", "dask", "--scheduler", cluster.scheduler_address)
    assert digests(tmp_path / "here") == digests(tmp_path / "there")

"""The prepare command as users run it: same bytes whatever runs it, killed and resumed, several lengths, elsewhere."""

import bz2
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard

from common.errors import UserError
from data import prepare, sources
from data.pipeline import run_task
from data.shards import PretrainingDataset, open_dataset
from data.stages import PIECE_BYTES
from data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = [
    f"{stem}{ending}" for stem in ("walk", "talk", "jump", "think", "look") for ending in ("", "s", "ed", "ing", "er")
]


def write_corpus(path: Path, documents: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("w") as stream:
        for number in range(documents):
            for _ in range(rng.randint(1, 12)):
                stream.write(" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) + f" {number}.\n")
            stream.write("\n")
    return path


@pytest.fixture(name="corpus", scope="module")
def _corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "a.txt", 1500)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sources and pieces from a small corpus, in this process."""
    monkeypatch.setattr(sources, "RANGE_BYTES", 200_000)


def run(corpus: Path | str, output: Path | str, *extra: str) -> None:
    arguments = [
        "--input", str(corpus), "--output_dir", str(output), "--vocab_size", "300", "--max_seq_length", "32",
        "--dupe_factor", "2", "--shard_rows", "3000", "--workers", "1", "--validation_share", "0.1", *extra,
    ]  # fmt: skip
    assert prepare.main(arguments) == 0


def digests(folder: Path) -> dict[str, str]:
    found = sorted([*folder.glob("*/*.hdf5"), *folder.glob("tokenizer/*")])
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def opened(folder: Path, split: str = "training", length: int = 32) -> PretrainingDataset:
    return open_dataset([folder], split=split, max_seq_length=length, max_predictions_per_seq=80)  # type: ignore[arg-type]


def test_the_same_bytes_whatever_the_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "one")
    run(corpus, tmp_path / "two", "--workers", "2")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(list((tmp_path / "one" / "32").glob("training*"))) > 2
    run(corpus, tmp_path / "other", "--seed", "7")
    assert digests(tmp_path / "other") != digests(tmp_path / "one")


def write_one_document(path: Path, layout: str, seed: int = 5) -> Path:
    """About a megabyte that is one document: lines broken anywhere, or one sentence a line and no blank line."""
    rng = random.Random(seed)
    sentences = [f"{' '.join(rng.choices(WORDS, k=rng.randint(3, 20)))} {n}.".capitalize() for n in range(15_000)]
    if layout == "sentences":
        path.write_text("\n".join(sentences))
    else:
        words = " ".join(sentences).split(" ")
        lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
        path.write_text("".join(line + "\n" * (1 + (number % 40 == 0)) for number, line in enumerate(lines)))
    return path


@pytest.mark.parametrize("layout", ["running", "sentences"])
def test_one_document_is_read_by_many_tasks_and_gives_the_same_bytes(tmp_path: Path, layout: str) -> None:
    """Of one file and one document, all workers read parts; it is counted as one and lies in one split."""
    (tmp_path / "in").mkdir()
    path = write_one_document(tmp_path / "in" / "a.txt", layout)
    small = [json.dumps({"text": f"Document {number} stands here. It is one of many."}) for number in range(700)]
    (tmp_path / "in" / "0.jsonl").write_text("\n".join(small))
    for workers in ("1", "2", "3"):
        run(tmp_path / "in", tmp_path / workers, "--layout", layout, "--workers", workers, "--keep_work")
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "3")
    done = sorted((tmp_path / "2" / ".work" / "done").glob("reading.*"))
    read = [json.loads(result.read_text()) for result in done[1:]]
    assert len(read) == -(-path.stat().st_size // 200_000) > 4
    assert all(result["pieces"] for result in read[:-1])
    assert all(result["counts"]["sentences"] > 1000 for result in read[:-1]), "each task reads its share"
    counts = json.loads((tmp_path / "2" / "32" / "report.json").read_text())["preparation"]
    assert counts["documents"] == 701
    encoded = sorted((tmp_path / "2" / ".work" / "done").glob("encoding.*"))[1:]
    splits = [json.loads(result.read_text())["splits"] for result in encoded]
    found = {(name, part["sole_key"]) for split in splits for name, part in split.items() if part["documents"]}
    assert len(encoded) > 4
    assert len(found) == 1
    assert None not in {key for _, key in found}


class Killed(BaseException):
    """Stands for a kill: nobody catches it."""


def test_killed_amid_one_document_it_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading, while encoding and while cutting, one after the other."""
    path = write_one_document(tmp_path / "a.txt", "running")
    run(path, tmp_path / "whole", "--validation_share", "0")
    for stage in ("reading", "encoding", "cutting"):
        left = iter(range(3))

        def until(function: Any, job: Any, at: str, *arguments: Any, stage: str = stage, left: Any = left) -> Any:
            if at == stage and next(left, None) is None:
                raise Killed
            return run_task(function, job, at, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr("data.pipeline.run_task", until)
            with pytest.raises(Killed):
                run(path, tmp_path / "killed", "--validation_share", "0")
    run(path, tmp_path / "killed", "--validation_share", "0")
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_what_another_version_left_unfinished_is_begun_anew(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(function: Any, job: Any, stage: str, *arguments: Any) -> Any:
        if stage == "encoding":
            raise Killed
        return run_task(function, job, stage, *arguments)

    for version, goes_on in ((prepare.WORK_FORMAT - 1, False), (prepare.WORK_FORMAT, True)):
        with monkeypatch.context() as patch:
            patch.setattr("data.pipeline.run_task", kill)
            patch.setattr(prepare, "WORK_FORMAT", version)
            with pytest.raises(Killed):
                run(corpus, tmp_path / str(version))
        capsys.readouterr()
        run(corpus, tmp_path / str(version))
        assert ("going on where an earlier run stopped" in capsys.readouterr().out) == goes_on


def test_finished_it_does_nothing_and_says_so(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    run(corpus, tmp_path)
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not (tmp_path / ".work").exists()
    with pytest.raises(UserError, match="--overwrite"):
        run(corpus, tmp_path, "--masking_rate", "0.2")
    run(corpus, tmp_path, "--masking_rate", "0.2", "--overwrite")


@pytest.mark.parametrize(
    ("flags", "lose"),
    [([], Path.unlink), (["--keep_work"], Path.unlink), (["--keep_work"], lambda path: os.truncate(path, 1000))],
    ids=["lost", "lost, work kept", "cut short, work kept"],
)
def test_a_shard_that_is_lost_is_made_again(
    flags: list[str],
    lose: Callable[[Path], None],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(corpus, tmp_path, *flags)
    before = digests(tmp_path)
    lost, *others = sorted((tmp_path / "32").glob("training*"))
    written = [path.stat().st_mtime_ns for path in others]
    lose(lost)
    run(corpus, tmp_path, *flags)
    if flags:
        assert [path.stat().st_mtime_ns for path in others] == written, "the others are not made again"
    told = capsys.readouterr()
    assert "nothing to do" not in told.out
    assert f"{lost.name} is not as manifest.json lists it" in told.err
    assert digests(tmp_path) == before


def test_shards_that_another_tool_wrote_are_not_replaced_unless_told(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "32").mkdir()
    for name in ("wiki_training_0.hdf5", "books_test_0.h5"):
        (tmp_path / "32" / name).write_bytes(b"weeks of work")
    with pytest.raises(UserError, match=r"holds 2 HDF5 files .* such as books_test_0.h5; .*--overwrite"):
        run(corpus, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["32", "books_test_0.h5", "wiki_training_0.hdf5"]
    run(corpus, tmp_path, "--overwrite")
    assert not list(tmp_path.glob("32/*_0.h*"))


@pytest.mark.usefixtures("heard_interrupts")
def test_killed_at_any_moment_and_started_again_it_gives_the_same_bytes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 8_000)
    assert corpus.stat().st_size > 2 * PIECE_BYTES
    arguments = ["--input", str(corpus), "--vocab_size", "300", "--max_seq_length", "32", "--dupe_factor", "2",
                 "--shard_rows", "4000", "--workers", "2"]  # fmt: skip
    whole = [sys.executable, "-m", "data.prepare", *arguments, "--output_dir", str(tmp_path / "whole")]
    subprocess.run(whole, cwd=ROOT, check=True, capture_output=True, timeout=120)
    command = [sys.executable, "-m", "data.prepare", *arguments, "--output_dir", str(tmp_path / "killed")]
    monkey = random.Random(3)
    done = tmp_path / "killed" / ".work" / "done"
    for stage, number in {"reading": signal.SIGINT, "encoding": signal.SIGKILL, "writing": signal.SIGKILL}.items():
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and not list(done.glob(f"{stage}.*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(monkey.random() * 0.05)
        assert process.poll() is None, f"ended before it could be killed while {stage}"
        os.killpg(process.pid, number)
        _, told = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on where it was" in told
            assert "Traceback" not in told
        else:
            assert process.returncode == -number
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 8_000)
    command = [sys.executable, "-m", "data.prepare", "--input", str(corpus), "--vocab_size", "300", "--workers", "2",
               "--output_dir", str(tmp_path / "out"), "--max_seq_length", "32"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    workers: list[psutil.Process] = []
    while len(workers) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        workers = [child for child in children if is_worker(child)]
    assert len(workers) == 2
    time.sleep(1)  # until they have begun to watch
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


@pytest.mark.parametrize("moment", ["_report", "_write_manifest", "_close_work"])
def test_killed_at_the_very_end_it_still_leaves_a_report_and_no_work(
    corpus: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare, moment, kill)
        with pytest.raises(Killed):
            run(corpus, tmp_path)
    run(corpus, tmp_path)
    assert not (tmp_path / ".work").exists()
    assert (tmp_path / "32" / "report.md").is_file()
    assert (tmp_path / "32" / "manifest.json").is_file()


@pytest.mark.parametrize("is_lost", [False, True], ids=["all shards there", "a shard lost meanwhile"])
@pytest.mark.parametrize("num_removed", [0, 1, 9])  # of the ten folders in it
def test_killed_while_it_removes_its_work_it_goes_on_with_what_is_left(
    corpus: Path, tmp_path: Path, num_removed: int, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree's files go in any order: of the one at hand when the kill comes, the marker may have been the first."""
    removed = []

    def remove(folder: Path, *_: object, **__: object) -> None:
        if len(removed) == num_removed:
            (folder / prepare.MARKER).unlink(missing_ok=True)
            raise Killed
        removed.append(folder)
        shutil.rmtree(folder)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "shutil", SimpleNamespace(rmtree=remove))
        with pytest.raises(Killed):
            run(corpus, tmp_path)
    before = digests(tmp_path)
    if is_lost:
        sorted((tmp_path / "32").glob("training*"))[1].unlink()
    run(corpus, tmp_path)
    assert digests(tmp_path) == before
    assert not (tmp_path / ".work").exists()


def test_killed_while_it_marks_its_work_it_begins_again(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / ".work").mkdir()
    (tmp_path / ".work" / f".{prepare.MARKER}.123.tmp").touch()
    run(corpus, tmp_path)
    assert not (tmp_path / ".work").exists()


def test_splits_that_come_out_empty_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 4)
    run(corpus, tmp_path / "all", "--validation_share", "0.0001")
    assert "no document is left for validation: --validation_share 0.0001" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"not one row to train on came out of 4 documents, 0 of them for training"):
        run(corpus, tmp_path / "none", "--validation_share", "0.9999")
    assert not (tmp_path / "none").exists()


def test_several_lengths_in_one_go(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, "--max_seq_length", "32", "64", "--max_predictions_per_seq", "5", "10")
    for length, predictions in ((32, 5), (64, 10)):
        dataset = open_dataset(
            [tmp_path / str(length)], split="training", max_seq_length=length, max_predictions_per_seq=predictions
        )
        rows = dataset.read_range(0, 100)
        assert rows.input_ids.shape == (100, length)
        assert rows.masked_lm_positions.shape == (100, predictions)
        assert rows.input_mask.sum(axis=1).max() == length


def test_splits_share_no_document_and_duplicates_go(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 300)
    corpus.write_text(corpus.read_text() * 2)
    run(corpus, tmp_path / "out", "--dupe_factor", "1", "--test_share", "0.1", "--objective", "mlm")
    counts = json.loads((tmp_path / "out" / "32" / "report.json").read_text())["preparation"]
    assert counts["duplicates"] == 300
    seen: dict[str, set[bytes]] = {}
    for split in ("training", "validation", "test"):
        dataset = opened(tmp_path / "out" / "32", split)
        rows = dataset.read_range(0, dataset.num_rows).with_originals()
        seen[split] = {row.tobytes() for row in rows.input_ids}
    assert not seen["training"] & seen["validation"]
    assert not seen["training"] & seen["test"]
    assert not seen["validation"] & seen["test"]


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
    """Unpacked by one, into parts between documents: the same documents as of the plain file, whoever cleans them."""
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
def test_an_archive_that_is_one_document_is_cleaned_by_many_tasks(tmp_path: Path, layout: str) -> None:
    plain = write_one_document(tmp_path / "a.txt", layout)
    archive = tmp_path / "a.txt.gz"
    archive.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    run(plain, tmp_path / "plain", "--validation_share", "0")
    for workers in ("1", "2"):
        run(archive, tmp_path / workers, "--validation_share", "0", "--workers", workers, "--keep_work")
        assert digests(tmp_path / workers) == digests(tmp_path / "plain")
    assert len(list((tmp_path / "2" / ".work" / "done").glob("reading.*"))) > 4


def test_tables_and_datasets_are_read_by_many_tasks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file of one row group, a saved dataset, and one by name, of two files: each gives the same bytes."""
    datasets = pytest.importorskip("datasets")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts = corpus.read_text().strip().split("\n\n")
    parquet.write_table(arrow.table({"text": texts[:500]}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": texts[500:1000]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "mine").mkdir()
    for name, part in (("a", texts[1000:1250]), ("b", texts[1250:])):
        lines = [json.dumps({"text": text}) for text in [*part, None, "", " \n\t "]]
        (tmp_path / "mine" / f"train-{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)  # where `datasets` takes a folder for a name
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


def test_files_that_are_cut_short_are_named_at_the_end(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(corpus.read_bytes()[:50_000])
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(corpus.read_bytes())[:-100])
    run(tmp_path / "in", tmp_path / "out")
    assert f"damaged or cut short: {tmp_path}/in/b.txt.gz; copy them again" in capsys.readouterr().err
    counts = json.loads((tmp_path / "out" / "32" / "report.json").read_text())["preparation"]
    assert counts["files_cut_short"] == 1
    assert counts["documents"] > 1000


def test_near_duplicates_go_on_request(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    corpus = write_corpus(tmp_path / "a.txt", 200)
    text = corpus.read_text()
    corpus.write_text(text + "\n" + text.replace(".\n\n", ". end.\n\n"))
    for name, extra, expected in (("kept", [], 0), ("dropped", ["--near_duplicates", "0.7"], 100)):
        run(corpus, tmp_path / name, *extra)
        counts = json.loads((tmp_path / name / "32" / "report.json").read_text())["preparation"]
        assert counts["duplicates"] == 0
        assert counts["near_duplicates"] >= expected


def test_a_missing_package_is_told_before_old_shards_go(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path)
    before = sorted(path.name for path in (tmp_path / "32").iterdir())
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match="needs the package 'datasketch'"):
        run(corpus, tmp_path, "--near_duplicates", "0.8", "--overwrite")
    assert sorted(path.name for path in (tmp_path / "32").iterdir()) == before


def test_an_unmasked_copy(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, "--dupe_factor", "0")
    dataset = opened(tmp_path / "32")
    rows = dataset.read_range(0, 200)
    assert not dataset.is_masked
    assert not rows.masked_lm_positions.any()
    assert load_tokenizer(tmp_path / "tokenizer").mask_id not in rows.input_ids
    assert opened(tmp_path / "32", "validation").is_masked


def test_a_given_tokenizer_is_used_and_recorded(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "first")
    vocabulary = tmp_path / "first" / "tokenizer" / "vocab.txt"
    arguments = ["--input", str(corpus), "--output_dir", str(tmp_path / "second"), "--vocab_file", str(vocabulary),
                 "--max_seq_length", "32", "--workers", "1"]  # fmt: skip
    assert prepare.main(arguments) == 0
    assert opened(tmp_path / "second" / "32").tokenizer_digest == opened(tmp_path / "first" / "32").tokenizer_digest


def test_a_tokenizer_smaller_than_asked_for_is_told(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(corpus, tmp_path, "--vocab_size", "5000")
    size = load_tokenizer(tmp_path / "tokenizer").vocab_size
    assert f"the tokenizer has {size:,} tokens, not the 5,000 of --vocab_size" in capsys.readouterr().err
    assert size < 5000


@pytest.mark.parametrize(
    "flags", [("--objective", "sop", "--masking_unit", "span"), ("--objective", "mlm", "--masking_unit", "word")]
)
def test_other_objectives_and_units_through_the_command(corpus: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    run(corpus, tmp_path, "--dupe_factor", "1", *flags)
    dataset = opened(tmp_path / "32")
    rows = dataset.read_range(0, dataset.num_rows)
    attributes = dataset.shards[0].attributes or {}
    assert [attributes["objective"], attributes["masking_unit"]] == [flags[1], flags[3]]
    assert rows.word_starts is not None
    starts = np.unpackbits(rows.word_starts, axis=1, count=32).astype(bool)
    masked = np.zeros_like(starts)
    row, column = np.nonzero(rows.masked_lm_positions)
    masked[row, rows.masked_lm_positions[row, column]] = True
    special = np.isin(rows.with_originals().input_ids, attributes["special_ids"])
    inside = ~starts[:, 1:] & ~special[:, 1:] & ~special[:, :-1]  # a segment may begin within a word
    assert inside.sum() > 1000
    assert np.array_equal(masked[:, 1:][inside], masked[:, :-1][inside]), "a word is masked whole or not at all"
    if flags[1] == "sop":
        assert 0.4 < rows.next_sentence_labels.mean() < 0.6
        together = (masked[:, 1:] & masked[:, :-1] & starts[:, 1:]).sum() / masked.sum()
        assert together > 0.3, "spans take words that stand side by side"
    else:
        assert not rows.segment_ids.any()
        assert (rows.next_sentence_labels == -1).all()


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
    assert memory.cat_file("/prepared/32/lengths.png").startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--work_dir"):
        run(corpus, "memory://elsewhere")


def test_a_dask_cluster_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    run(corpus, tmp_path / "here")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as cluster:
        run(corpus, tmp_path / "there", "--executor", "dask", "--scheduler", cluster.scheduler_address)
    assert digests(tmp_path / "here") == digests(tmp_path / "there")


def test_mistakes_are_told_all_at_once_with_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", "--input", str(tmp_path), "--output_dir", str(tmp_path / "o"),
               "--vocab_size", "300", "--masking_rate", "2", "--max_seq_length", "3", "--shard_rows", "0"]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for flag in ("--masking_rate", "--max_seq_length", "--shard_rows"):
        assert flag in result.stderr


def test_an_input_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 50)
    with pytest.raises(UserError, match="no document"):
        run(tmp_path / "a.txt", tmp_path / "o")


def test_pairs_of_the_written_shards(corpus: Path, tmp_path: Path) -> None:
    """Half of B is random and from another document; documents carry their number as a token."""
    run(corpus, tmp_path, "--dupe_factor", "1", "--max_seq_length", "64", "--masking_rate", "0.1")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    rows = opened(tmp_path / "64", length=64).read_range(0, 1000).with_originals()
    assert 0.4 < rows.next_sentence_labels.mean() < 0.7
    same = {0: 0, 1: 0}
    total = {0: 0, 1: 0}
    for k in range(1000):
        ids = rows.input_ids[k]
        length = int(rows.input_mask[k].sum())
        first, second = np.flatnonzero(ids[:length] == tokenizer.sep_id)
        assert second == length - 1
        assert (rows.segment_ids[k, : first + 1] == 0).all()
        assert (rows.segment_ids[k, first + 1 : length] == 1).all()
        a, b = (tokenizer.backend.decode(part.tolist()) for part in (ids[1:first], ids[first + 1 : second]))
        numbers = [
            {word.strip(".") for word in text.replace(" .", ".").split() if word.strip(".").isdigit()}
            for text in (a, b)
        ]
        if all(numbers):
            label = int(rows.next_sentence_labels[k])
            total[label] += 1
            same[label] += bool(numbers[0] & numbers[1])
    assert total[0] > 100
    assert total[1] > 100
    assert same[0] / total[0] > 0.9
    assert same[1] / total[1] < 0.1

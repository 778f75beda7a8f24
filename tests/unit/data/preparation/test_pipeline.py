"""Stages, deduplication and splits of documents that span several pieces."""

import gzip
import json
import re
import time
from pathlib import Path

import pytest

from common.console import console
from data.preparation.duplicates import DROPPED
from data.preparation.pipeline import Pipeline
from data.preparation.settings import Settings
from data.preparation.tasks import encode
from data.preparation.work_folder import Job
from data.text.sources import find_sources
from data.tokenizer_training import train_tokenizer

WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnrst"]


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, lines in ((0.01, range(3, 9)), (30.0, [0])):
        monkeypatch.setattr("common.console.SECONDS_PER_LINE", seconds)
        with console.progress(total=5, desc="reading", unit="part", in_lines=True) as bar:
            for _ in range(5):
                time.sleep(0.02)
                bar.update()
        printed = capsys.readouterr().err
        assert len(printed.splitlines()) in lines
        assert "\r" not in printed
        assert not printed or "reading: 100%" in printed


def wait_a_moment(_: Job, number: int) -> int:
    time.sleep(0.02)
    return number


def test_a_stage_prints_its_rate_and_remaining_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.console.SECONDS_PER_LINE", 0.01)
    pipeline = Pipeline(Job(Settings((32,), (5,)), str(tmp_path), "", ""), None, 1)
    tasks = [(f"{number}", (number,)) for number in range(8)]
    assert pipeline.run_stage("reading", wait_a_moment, tasks, "part") == list(range(8))
    printed = capsys.readouterr().err
    rates = re.findall(r"reading: +\d+%.* (\d)/8 \[\d\d:\d\d<(\d\d:\d\d|\?), +([\d.]+|\?)(part/s|s/part)\]", printed)
    assert len(rates) == len(list(filter(None, printed.splitlines()))) > 4
    assert [done for done, *_ in rates] == sorted(done for done, *_ in rates)
    assert rates[-1][1] == "00:00"
    assert 0 < float(rates[-1][2]) < 50
    assert pipeline.run_stage("reading", wait_a_moment, tasks, "part") == list(range(8)), (
        "results of an earlier run are reused"
    )


@pytest.fixture(name="_small_limits")
def _small_limits_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.sources.RANGE_BYTES", 700)
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT", 300)
    monkeypatch.setattr("data.preparation.reading.PIECE_BYTES", 200)


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("layout", ["sentences", "paragraphs", "running"])
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_a_repeated_document_is_dropped_whole_however_its_copies_are_cut(
    tmp_path: Path, layout: str, shift: int
) -> None:
    """Longer than a range and than a piece, at different places of a file, in an archive, and as a record."""
    big = "".join(f"Line {k} of {' '.join(WORDS[k % 90 : k % 90 + 9])}.\n" for k in range(60))
    small = "".join(f"A small one, {k}.\n" for k in range(shift))
    if layout == "running":
        (tmp_path / "0.txt").write_text(big)
        (tmp_path / "1.txt").write_text(big)
    else:
        (tmp_path / "0.txt").write_text(f"{big}\n{small}\n{big}\n{big}more.\n")
    (tmp_path / "2.txt.gz").write_bytes(gzip.compress(big.encode()))
    (tmp_path / "3.jsonl").write_text(json.dumps({"text": big}))
    job = Job(Settings((32,), (5,)), str(tmp_path / ".work"), str(tmp_path), "")
    pipeline = Pipeline(job, None, 1)
    read = pipeline.read(find_sources([str(tmp_path)], layout))
    assert pipeline.deduplicate(read)["duplicates"] == 3
    kept = [
        text
        for result in read
        for piece, _, _ in result["pieces"]
        for text, key in zip(job.folder.texts(piece), job.folder.load_array("keys", piece), strict=True)
        if key != DROPPED
    ]
    others = "" if layout == "running" else f"{small}{big}more."
    assert " ".join(kept).split() == f"{big}{others}".split()
    assert len(kept) > 6


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("layout", ["sentences", "running"])
def test_a_document_that_spans_several_pieces_is_in_one_split(tmp_path: Path, layout: str) -> None:
    for number in range(12):
        lines = [f"{number} {' '.join(WORDS[k : k + 9])}.\n" for k in range(80)]
        (tmp_path / f"{number:02d}.txt").write_text("".join(lines))
    train_tokenizer(WORDS, 200).save(tmp_path / ".tokenizer")
    work = str(tmp_path / ".work")
    job = Job(Settings((32,), (5,), validation_share=0.5), work, work, str(tmp_path / ".tokenizer"))
    pipeline = Pipeline(job, None, 1)
    read = pipeline.read(find_sources([str(tmp_path)], layout))
    assert sum(result["counts"]["documents"] for result in read) == 12
    pieces = [name for result in read for name, _, _ in result["pieces"]]
    assert len(pieces) > 36
    pipeline.deduplicate(read)
    splits: dict[int, set[str]] = {}
    for piece in pieces:
        for split, found in encode(job, piece)["splits"].items():
            if found["documents"]:
                stored = job.folder.load_documents(f"{split}-{piece}")
                assert found["documents"] == len(stored.document_keys)
                for key in stored.document_keys.tolist():
                    splits.setdefault(key, set()).add(split)
    assert len(splits) == 12
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"training", "validation"}

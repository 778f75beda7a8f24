"""The tasks of a preparation, one by one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import console
from data.pipeline import choose_donors, plan_shards
from data.settings import Settings
from data.sources import Source
from data.stages import Job, _encoder, encode, ingest
from data.tokenizer import train_tokenizer

WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnrst"]


def test_threads_of_one_worker_never_share_an_encoder(tmp_path: Path) -> None:
    train_tokenizer(WORDS, 200).save(tmp_path)
    together = Barrier(2)

    def own(_: int) -> object:
        together.wait(timeout=10)
        encoder = _encoder(str(tmp_path))
        assert encoder is _encoder(str(tmp_path)), "a thread keeps what it has learnt"
        return encoder

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(own, range(2))
    assert first is not second


def test_a_tokenizer_made_anew_in_the_same_place_is_read_anew(tmp_path: Path) -> None:
    train_tokenizer(WORDS, 200).save(tmp_path)
    before = _encoder(str(tmp_path)).vocab_size
    train_tokenizer(WORDS, 60).save(tmp_path)
    assert _encoder(str(tmp_path)).vocab_size < before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 25))
def test_shards_share_the_rows_evenly_and_lose_none(sizes: list[int], shard_rows: int) -> None:
    parts = [(f"piece{number}", "donor", number % 3, size) for number, size in enumerate(sizes)]
    tasks = plan_shards("training", 32, 5, parts, shard_rows)
    rows = [
        (part.piece, row, part.first_number + row - part.start)
        for task in tasks
        for part in task.ranges
        for row in range(part.start, part.stop)
    ]
    named = [(piece, row) for piece, _, _, size in parts for row in range(size)]
    assert rows == [(*row, number) for number, row in enumerate(named)]
    held = [sum(part.stop - part.start for part in task.ranges) for task in tasks]
    assert len(tasks) == -(-sum(sizes) // shard_rows)
    assert not held or (max(held) <= shard_rows and max(held) - min(held) <= 1)


def test_many_shards_of_many_pieces_are_planned_at_once() -> None:
    parts = [(f"{number}", "donor", 0, 8000) for number in range(50_000)]
    started = time.process_time()
    assert len(plan_shards("training", 128, 20, parts, 32768)) == 12208
    assert time.process_time() - started < 10, "shards times pieces would take minutes"


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, lines in ((0.01, range(3, 9)), (30.0, [0])):
        monkeypatch.setattr("common.console.SECONDS_A_LINE", seconds)
        with console.progress(total=5, desc="reading", unit="part", in_lines=True) as bar:
            for _ in range(5):
                time.sleep(0.02)
                bar.update()
        told = capsys.readouterr().err
        assert len(told.splitlines()) in lines
        assert "\r" not in told
        assert not told or "reading: 100%" in told


def test_donors_are_of_another_document_where_there_is_one() -> None:
    keys = [5, 5, None, 5, 8, 8]
    for shift in range(1, 6):
        for piece, donor in enumerate(choose_donors(keys, shift)):
            assert donor != piece
            assert keys[donor] is None or keys[donor] != keys[piece]
    assert choose_donors([None] * 4, 3) == [3, 0, 1, 2]
    assert len(choose_donors([5] * 20_000, 7)) == 20_000, "a single document of any size takes no time"


def test_the_parts_of_a_document_are_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.LARGEST_DOCUMENT", 300)
    monkeypatch.setattr("data.stages.PIECE_BYTES", 1000)
    documents = ["".join(f"{number} {' '.join(WORDS[k : k + 9])}.\n" for k in range(80)) for number in range(12)]
    (tmp_path / "a.txt").write_text("\n".join(documents))
    train_tokenizer(WORDS, 200).save(tmp_path / "tokenizer")
    job = Job(Settings((32,), (5,), validation_share=0.5), str(tmp_path), str(tmp_path), str(tmp_path / "tokenizer"))
    result = ingest(job, 0, [Source(str(tmp_path / "a.txt"), "sentences")])
    assert result["counts"]["documents"] == 12
    assert len(result["pieces"]) > 12
    splits: dict[int, set[str]] = {}
    for name, count in result["pieces"]:
        job.folder.save_array("keep", name, np.ones(count, dtype=bool))
        encoded = encode(job, name)["splits"]
        for split in ("training", "validation"):
            stored = job.folder.load_documents(f"{split}-{name}")
            assert encoded[split]["documents"] == len(stored.document_keys)
            for key in stored.document_keys.tolist():
                splits.setdefault(key, set()).add(split)
    assert len(splits) == 12
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"training", "validation"}

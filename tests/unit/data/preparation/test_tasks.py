"""The tasks of a preparation, one by one."""

import gzip
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import console
from data.preparation.duplicates import GOES_ON
from data.preparation.fingerprints import Fingerprint
from data.preparation.pipeline import Pipeline, choose_donors, join_documents, plan_shards
from data.preparation.settings import Settings
from data.preparation.tasks import Job, _encoder, encode, ingest, piece_documents
from data.preparation.work_folder import WorkFolder
from data.text.sources import Source, find_sources
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


@settings(max_examples=100)
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


def wait_a_moment(_: Job, number: int) -> int:
    time.sleep(0.02)
    return number


def test_a_stage_tells_its_rate_and_how_long_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.console.SECONDS_A_LINE", 0.01)
    pipeline = Pipeline(Job(Settings((32,), (5,)), str(tmp_path), "", ""), None, 1)
    tasks = [(f"{number}", (number,)) for number in range(8)]
    assert pipeline.run_stage("reading", wait_a_moment, tasks, "part") == list(range(8))
    told = capsys.readouterr().err
    rates = re.findall(r"reading: +\d+%.* (\d)/8 \[\d\d:\d\d<(\d\d:\d\d|\?), +([\d.]+part/s|\?part/s)\]", told)
    assert len(rates) == len(list(filter(None, told.splitlines()))) > 4
    assert [done for done, _, _ in rates] == sorted(done for done, _, _ in rates)
    assert rates[-1][1] == "00:00"
    assert 0 < float(rates[-1][2].removesuffix("part/s")) < 50
    assert pipeline.run_stage("reading", wait_a_moment, tasks, "part") == list(range(8)), "done before, so told at once"


def test_donors_are_of_another_document_where_there_is_one() -> None:
    keys = [5, 5, None, 5, 8, 8]
    for shift in range(1, 6):
        for piece, donor in enumerate(choose_donors(keys, shift)):
            assert donor != piece
            assert keys[donor] is None or keys[donor] != keys[piece]
    assert choose_donors([None] * 4, 3) == [3, 0, 1, 2]
    assert len(choose_donors([5] * 20_000, 7)) == 20_000, "a single document of any size takes no time"


def test_the_parts_of_a_document_are_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.documents.LARGEST_DOCUMENT", 300)
    monkeypatch.setattr("data.preparation.tasks.PIECE_BYTES", 1000)
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


def test_hashes_are_saved_on_the_way_once_no_further_text_can_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset's task may be of any size. One document is of many pieces here, and the others of one each."""
    monkeypatch.setattr("data.text.documents.LARGEST_DOCUMENT", 10)
    monkeypatch.setattr("data.preparation.tasks.PIECE_BYTES", 20)
    documents = ["One is here.", "\n".join(f"This is part {number} of it." for number in range(4)), "Three.", "Four."]
    (tmp_path / "a.txt").write_text("\n\n".join(documents * 2))
    saved: list[str] = []
    save = WorkFolder.save_array

    def noted(folder: WorkFolder, kind: str, name: str, array: np.ndarray) -> None:
        saved.append(f"{kind} {int(name[-6:])}")
        save(folder, kind, name, array)

    monkeypatch.setattr(WorkFolder, "save_array", noted)
    job = Job(Settings((32,), (5,), min_document_words=1), str(tmp_path / "work"), "", "")
    result = ingest(job, 0, [Source(str(tmp_path / "a.txt"), "sentences")])
    assert saved.index("hashes 0") < saved.index("keys 6"), "not held until all is read"
    hashes = np.concatenate([job.folder.load_array("hashes", piece) for piece, _ in result["pieces"]])
    expected = [Fingerprint.of(text).hash for text in documents * 2]
    assert [int(found) for found in hashes if found != GOES_ON] == expected
    assert len(saved) == len(set(saved)) == 2 * len(result["pieces"])


@given(st.text(alphabet="ab é漢\n", max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_a_fingerprint_is_the_same_however_a_text_is_cut(text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = Fingerprint()
    for start, stop in pairwise(bounds):
        found = found.followed_by(Fingerprint.of(text[start:stop]))
    assert found == Fingerprint.of(text) == Fingerprint.of("".join(text.split()))
    assert Fingerprint.of(text + "a").hash != found.hash


def test_fingerprints_of_other_texts_are_others() -> None:
    texts = {f"{a}{b}" for a in range(300) for b in range(300)} | {"ab" * n for n in range(1, 500)}
    texts |= {"The lot is called a1234567i", "The lot is called b1234567."}  # once the same, modulo 2**64 - 59
    assert len({Fingerprint.of(text).hash for text in texts}) == len(texts)


@pytest.mark.parametrize("layout", ["sentences", "paragraphs", "running"])
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_a_repeated_document_goes_whole_however_its_copies_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, shift: int
) -> None:
    """Beyond a range and the largest text, at other places of a file, in an archive, and as a record."""
    monkeypatch.setattr("data.text.sources.RANGE_BYTES", 700)
    monkeypatch.setattr("data.text.documents.LARGEST_DOCUMENT", 300)
    monkeypatch.setattr("data.preparation.tasks.PIECE_BYTES", 400)
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
    read = pipeline.ingest(find_sources([str(tmp_path)], layout))
    pieces = [name for result in read for name, _ in result["pieces"]]
    dropped = pipeline.deduplicate(pieces, [whole for result in read for whole in result["wholes"]])
    assert dropped["duplicates"] == 3
    kept = [" ".join(document) for piece in pieces for document in piece_documents(job.folder, piece)]
    others = "" if layout == "running" else f"{small}{big}more."
    assert " ".join(kept).split() == f"{big}{others}".split()
    assert len(kept) > 6


def read_all(root: Path, inputs: list[str], layout: str) -> tuple[list[tuple[str, int]], Counter[str]]:
    """Every text with its document's key, in order, as encoding is told them, and all counts."""
    job = Job(Settings((32,), (5,)), str(root), str(root), str(root / "tokenizer"))
    texts: list[tuple[str, int]] = []
    counts: Counter[str] = Counter()
    for result in Pipeline(job, None, 1).ingest(find_sources(inputs, layout)):
        counts.update(result["counts"])
        for piece, size in result["pieces"]:
            keys = job.folder.load_array("keys", piece)
            number, key = result["joined"].get(piece, (0, 0))
            keys[:number] = key
            found = job.folder.text_path(piece).read_text().rstrip("\n").split("\n\n")
            assert len(found) == len(keys) == size
            texts += zip(found, keys.tolist(), strict=True)
    return texts, counts


def grouped(texts: list[tuple[str, int]]) -> list[str]:
    """The documents: texts of one key put together."""
    return ["\n".join(text for text, _ in group) for _, group in groupby(texts, key=lambda text: text[1])]


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
def test_a_document_has_one_key_however_many_tasks_read_it(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[list[str]]], size: int, largest: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    number = 0
    for name, documents in enumerate(files):
        lines: list[str] = []
        for document in documents:
            for kind in [*document, "short"] if "word" in document else document:  # none is too short as a whole
                lines.append(KINDS[kind].format(number))
                number += 1
            lines.append("\n")
        (folder / f"{name}.txt").write_text("".join(lines))
    expected, whole = read_all(folder / ".whole", [str(folder)], "sentences")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.text.sources.RANGE_BYTES", size)
        patch.setattr("data.text.documents.LARGEST_DOCUMENT", largest)
        patch.setattr("data.preparation.tasks.PIECE_BYTES", piece)
        texts, counts = read_all(folder / ".cut", [str(folder)], "sentences")
    assert grouped(texts) == [text for text, _ in expected]
    assert counts["documents"] == whole["documents"]
    assert counts["sentences"] == whole["sentences"]
    assert counts["documents_cut"] == len(texts) - len(expected)


def test_every_file_of_running_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        lines = [f"{name} {number} is a line that\n" + "\n" * (number % 5 == 4) for number in range(100)]
        (tmp_path / f"{name}.txt").write_text("" if name == "b" else "".join(lines))
    monkeypatch.setattr("data.text.sources.RANGE_BYTES", 300)
    monkeypatch.setattr("data.preparation.tasks.PIECE_BYTES", 100)
    texts, counts = read_all(tmp_path / ".work", [str(tmp_path)], "running")
    first, second = grouped(texts)
    for document, name in ((first, "a"), (second, "c")):
        assert document.split() == (tmp_path / f"{name}.txt").read_text().split()
    assert counts["documents"] == 2
    assert counts["documents_cut"] == len(texts) - 2 > 10


def test_a_document_whose_beginning_is_no_text_begins_where_its_text_does() -> None:
    """Ranges of two files: text and an end, junk only, text that goes on twice; then a file of junk, and text."""
    places = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1)]
    base = {"counts": {"documents_cut": 0}, "broken": [], "head": [0, 0], "open": None}
    parts = {name: Fingerprint.of(f"text {name}") for name in ("p2 p3", "p4 p5", "p6")}
    read = [
        {**base, "pieces": [["p0", 2]], "going_on": 0, "open_key": None},
        {**base, "pieces": [], "going_on": 0, "open_key": None},
        {**base, "pieces": [["p2", 1], ["p3", 1]], "going_on": 2, "head": parts["p2 p3"], "open_key": 5},
        {**base, "pieces": [["p4", 1], ["p5", 3]], "going_on": 2, "head": parts["p4 p5"], "open_key": 6,
         "open": ["p5", 2, Fingerprint()]},
        {**base, "pieces": [], "going_on": 0, "open_key": None},
        {**base, "pieces": [["p6", 1]], "going_on": 1, "head": parts["p6"], "open_key": None},
    ]  # fmt: skip
    joined = join_documents([[Source(path, "sentences", start)] for path, start in places], read)
    assert [result["joined"] for result in joined] == [{}, {}, {}, {"p4": (1, 5), "p5": (1, 5)}, {}, {}]
    both = parts["p2 p3"].followed_by(parts["p4 p5"])
    expected = [[], [], [("p2", 0, parts["p2 p3"].hash)], [("p2", 0, both.hash)], [], [("p6", 0, parts["p6"].hash)]]
    assert [result["wholes"] for result in joined] == expected
    assert [result["counts"]["documents"] for result in joined] == [0, 0, 1, 0, 0, 1]
    assert [result["counts"]["documents_cut"] for result in joined] == [0, 0, -1, 0, 0, -1]


@pytest.mark.parametrize("layout", ["sentences", "running"])
def test_what_several_tasks_read_of_a_document_is_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr("data.text.sources.RANGE_BYTES", 700)
    monkeypatch.setattr("data.text.documents.LARGEST_DOCUMENT", 300)
    monkeypatch.setattr("data.preparation.tasks.PIECE_BYTES", 400)
    for number in range(12):
        lines = [f"{number} {' '.join(WORDS[k : k + 9])}.\n" for k in range(80)]
        (tmp_path / f"{number:02d}.txt").write_text("".join(lines))
    train_tokenizer(WORDS, 200).save(tmp_path / ".tokenizer")
    work = str(tmp_path / ".work")
    job = Job(Settings((32,), (5,), validation_share=0.5), work, work, str(tmp_path / ".tokenizer"))
    pipeline = Pipeline(job, None, 1)
    read = pipeline.ingest(find_sources([str(tmp_path)], layout))
    assert sum(result["counts"]["documents"] for result in read) == 12
    assert sum(bool(result["pieces"]) for result in read) > 36, "many tasks read each of them"
    pieces = [name for result in read for name, _ in result["pieces"]]
    pipeline.deduplicate(pieces)
    joined = {piece: part for result in read for piece, part in result["joined"].items()}
    splits: dict[int, set[str]] = {}
    for result in pipeline.encode(pieces, joined):
        for split, found in result["splits"].items():
            if found["documents"] and found["sole_key"] is not None:
                splits.setdefault(found["sole_key"], set()).add(split)
    assert len(splits) == 12
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"training", "validation"}

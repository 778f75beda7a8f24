"""The prepare command as users run it: its flags, splits, tokenizers and mistakes."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data import prepare
from data.shards.dataset import open_dataset
from data.tokenizer import load_tokenizer
from tests.integration.prepare.corpora import ROOT, opened, run, write_corpus


def test_empty_splits_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 4)
    run(corpus, tmp_path / "all", "--validation_share", "0.0001")
    assert "no document is left for validation: --validation_share 0.0001" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"4 documents, 0 of them for training, gave not one row to train on"):
        run(corpus, tmp_path / "none", "--validation_share", "0.9999")
    assert not (tmp_path / "none").exists()


def test_counts_and_remedies_say_what_is_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of a thing is not several, and a tokenizer that was just trained is not advised."""
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x4E00, 0x5A00))) + "。\n这是一句话。\n")
    (tmp_path / "b.jsonl").write_text('{"text": "一句话。"}\n{"text": 1}\n')
    inputs = ["--input", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    words = [*inputs, "--objective", "mlm", "--max_seq_length", "32"]
    for name, tokenizer in (("first", "--vocab_size 200"), ("second", f"--vocab_file {tmp_path}/first/tokenizer")):
        output = ["--output_dir", str(tmp_path / name), "--workers", "1", "--validation_share", "0"]
        assert prepare.main([*words, *output, *tokenizer.split()]) == 0
        printed = capsys.readouterr()
        for counted in ("1 file read as sentences, 1 file read as jsonl, 2 documents,", "1 record without text"):
            assert counted in printed.out
        assert ("Train one with --vocab_size" in printed.err) == (name == "second")
        assert ("Raise --vocab_size, or --tokenizer_sample_mb." in printed.err) == (name == "first")


def test_several_lengths_in_one_run(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, "--max_seq_length", "32", "64", "--max_predictions_per_seq", "5", "10")
    for length, predictions in ((32, 5), (64, 10)):
        dataset = open_dataset(
            [tmp_path / str(length)], split="training", max_seq_length=length, max_predictions_per_seq=predictions
        )
        rows = dataset.read_range(0, 100)
        assert rows.input_ids.shape == (100, length)
        assert rows.masked_lm_positions.shape == (100, predictions)
        assert rows.input_mask.sum(axis=1).max() == length


def test_splits_share_no_document_and_duplicates_are_dropped(tmp_path: Path) -> None:
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


def test_truncated_files_are_named_at_the_end(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(corpus.read_bytes()[:50_000])
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(corpus.read_bytes())[:-100])
    run(tmp_path / "in", tmp_path / "out")
    assert f"damaged or cut short: {tmp_path}/in/b.txt.gz; copy them again" in capsys.readouterr().err
    counts = json.loads((tmp_path / "out" / "32" / "report.json").read_text())["preparation"]
    assert counts["files_cut_short"] == 1
    assert counts["documents"] > 1000


def test_near_duplicates_are_dropped_on_request(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 200)
    text = corpus.read_text()
    corpus.write_text(text + "\n" + text.replace(".\n\n", ". end.\n\n"))
    for name, extra, expected in (("kept", [], 0), ("dropped", ["--near_duplicates", "0.7"], 100)):
        run(corpus, tmp_path / name, *extra)
        counts = json.loads((tmp_path / name / "32" / "report.json").read_text())["preparation"]
        assert counts["duplicates"] == 0
        assert counts["near_duplicates"] >= expected


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


def test_a_tokenizer_smaller_than_requested_is_reported(
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
    attributes = dataset.shards[0].layout.attributes or {}
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
        assert together > 0.3, "spans mask neighbouring words"
    else:
        assert not rows.segment_ids.any()
        assert (rows.next_sentence_labels == -1).all()


def test_mistakes_are_reported_all_at_once_with_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", "--input", str(tmp_path), "--output_dir", str(tmp_path / "o"),
               "--vocab_size", "300", "--masking_rate", "2", "--max_seq_length", "3", "--shard_rows", "0"]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
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

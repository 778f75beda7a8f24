"""The last line of each benchmark is JSON with the keys that its readers know; nothing is measured here."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepspeed_train
from benchmarks import prepare, read, saving, scaling, train_step
from tests.support import PROJECT

COMMANDS = [path for path in sorted((PROJECT / "benchmarks").glob("*.py")) if "ArgumentParser" in path.read_text()]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {**dict.fromkeys(train_step.CONTENDERS, 100.0), "engine": 120.0}
    limits = {"torch": 200.0, "openblas": 250.0}
    measured = train_step.Measured(speeds, limits, dict.fromkeys(train_step.CONTENDERS, 900.0))
    monkeypatch.setattr(train_step, "measure", lambda *_: measured)
    assert train_step.main(["--lengths", "128", "512", "--contenders", *train_step.CONTENDERS]) == 0
    result = last_line(capsys)
    assert result.keys() == {"seq128", "seq512"}
    for row in result.values():
        assert [row[key] for key in ("ratio", "modern_ratio", "ours_share", "engine_share")] == [1.2, 1.0, 0.4, 0.48]
        assert (row["torch_limit"], row["openblas_limit"]) == (200.0, 250.0)
        assert {*train_step.CONTENDERS, "peak_mb", "transformers_peak_mb"} <= row.keys()


def test_scaling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_folder: Path, _words: list[str], ranks: int, _job: str) -> float:
        return {1: 1000.0, 2: 950.0}[ranks]

    monkeypatch.setattr(scaling, "measure", measure)
    assert scaling.main(["--rounds", "1"]) == 0
    result = last_line(capsys)
    assert result["two_ranks_over_one"] == 0.95
    assert result["tokens_per_second"] == {"1": [1000.0], "2": [950.0]}


def test_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"rows_per_cpu_s": 1e4, "rows_per_s": 9e3, "first_s": 0.1, "rss_mb": 300.0, "base_mb": 250.0}
    monkeypatch.setattr(read, "_write", lambda *_: None)
    job = {"ranks": 512, "batch": 1024, "units": 512, "decoded": 1.1, "rows_per_s": 9.0}
    others = {"jobs": [job], "resumed": {"0": 0.1}}
    monkeypatch.setattr(read, "_run", lambda _, masking, *__: others.get(masking, found))
    assert read.main([]) == 0
    keys = {"rows_per_s", "rows_per_s_nvidia", "rss_mb", "rows_per_s_word", "rows_per_s_uncompressed",
            "first_batch_s_by_step"}  # fmt: skip
    assert keys <= last_line(capsys).keys()


def test_prepare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_folder: Path, tokenizer: list[str], megabytes: float, workers: int) -> dict[str, float]:
        rss = megabytes + (200 if "--vocab_size" in tokenizer else 100)
        return {"rate": 1e4, "rss_mb": rss, "instances": 600 * workers, "seconds": 2, "own_share": 0.1 / workers}

    monkeypatch.setattr(prepare, "_tokenizer", lambda folder, _megabytes: folder)
    monkeypatch.setattr(prepare, "_measure", measure)
    monkeypatch.setattr(prepare, "_peer_rate", lambda *_: 5e3)
    assert prepare.main(["--sizes_mb", "1", "--rss_mb", "2", "--workers", "3"]) == 0
    result = last_line(capsys)
    assert (result["rss_1x_mb"], result["rss_10x_mb"]) == (102, 120)
    assert (result["rss_1x_mb_vocab_trained"], result["rss_10x_mb_vocab_trained"]) == (202, 220)
    assert (result["instances_per_s"], result["instances_per_s_all_workers"], result["workers"]) == (300, 900, 3)
    assert result["cpu_share_outside_workers"] == 0.033
    assert {"instances_per_s_per_core", "peer_instances_per_s_per_core", "rate_by_mb"} <= result.keys()


def test_saving(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def save(words: list[str]) -> int:
        flags = argparse.Namespace(**dict(zip(words[::2], words[1::2], strict=True)))
        folder = Path(vars(flags)["--output_dir"]) / "saved_models" / "benchmark"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_bytes(b"x" * 2_000_000)
        return 0

    monkeypatch.setattr(deepspeed_train, "main", save)
    monkeypatch.setattr(saving.Stopwatch, "put_around", lambda _, owner, name: getattr(owner, name))  # they exist
    monkeypatch.setattr(saving.Stopwatch, "best", lambda *_: 0.6)
    assert saving.main([]) == 0
    result = last_line(capsys)
    assert result["share_at_10_minutes"] == pytest.approx(0.001)
    assert result["megabytes"] == 2.0
    assert {"seconds_blocked", "seconds_behind", "seconds_to_verify", "seconds_to_load"} <= result.keys()


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_each_runs_as_a_file_from_anywhere(path: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(path), "--help"]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert path.name in child.stdout

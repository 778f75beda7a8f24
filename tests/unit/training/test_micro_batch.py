"""--find_micro_batch: the largest size that fits in memory, found by trying, kept when the run resumes."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.support import write_project, write_two_lengths
from tests.unit.training.in_process import run_here
from training import micro_batch
from training.micro_batch import Outcome, Trials, full_rows, largest_that_fits
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import Settings, find_sizes, read_found, resolve_settings, with_micro_batch


def resolve(words: list[str], ranks: int = 1) -> Settings:
    flags, problems = read_arguments([*words, "--find_micro_batch"])
    return resolve_settings(flags, RankInfo(0, 0, ranks, ranks), problems)


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 11, 12, 30, 96, 200])
def test_sizes_are_doubled_until_one_does_not_fit_and_then_bisected(limit: int) -> None:
    sizes, tried = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96], []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest_that_fits(sizes, fits) == max((size for size in sizes if size <= limit), default=None)
    assert len(tried) == len(set(tried)) <= 10
    assert all(later <= 2 * earlier for earlier, later in pairwise(tried))


def test_only_sizes_that_keep_every_step_and_length_are_tried(tmp_path: Path) -> None:
    words = write_project(tmp_path, train_batch_size=48, train_micro_batch_size_per_gpu=4)
    assert find_sizes(resolve(words), 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert find_sizes(resolve(words, ranks=2), 2) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert find_sizes(resolve([*words, "--batch_schedule", "0:32,1k:64"]), 1) == [1, 2, 4, 8, 16]
    two_lengths = write_two_lengths(tmp_path / "two", train_batch_size=8)
    settings = with_micro_batch(resolve(two_lengths), 2, 1)
    assert [(each.length, each.micro) for each in settings.lengths] == [(12, 4), (24, 2)]


def test_what_was_found_is_read_from_the_checkpoint_of_the_same_ranks(tmp_path: Path) -> None:
    settings = with_micro_batch(resolve(write_project(tmp_path, train_batch_size=48)), 6, 1)
    assert (settings.deepspeed.batch.micro, settings.deepspeed.batch.accumulation) == (6, 8)
    resolved = tmp_path / "resolved.json"
    resolved.write_text(str(settings.sources["resolved.json"]))
    assert read_found([tmp_path / "none", tmp_path], [3, 6], 1) == 6
    assert read_found([tmp_path], [3, 6], 2) is None
    assert read_found([tmp_path], [1, 3], 1) is None
    for flags in ({"find_micro_batch": False}, {}, None):
        resolved.write_text(json.dumps({**json.loads(resolved.read_text()), "flags": flags}))
        assert read_found([tmp_path], [3, 6], 1) is None


def test_trial_rows_are_full_and_have_every_prediction() -> None:
    rows = full_rows(3, 10, 4, num_tokens=7)
    assert rows.input_mask.all()
    assert (rows.masked_lm_labels >= 0).sum(1).tolist() == [4] * 3
    assert int(rows.input_ids.max()) == 6


def test_a_run_takes_the_largest_size_within_the_memory_limit_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real child processes. The logits of 64 rows take 358 MB, and half of it again; those of one row 6 MB."""
    words = write_project(tmp_path, predictions=20, train_batch_size=64, train_micro_batch_size_per_gpu=1)
    content = json.loads((tmp_path / "model.json").read_text())
    content["bert_model_config"]["vocab_size"] = 70_000
    (tmp_path / "model.json").write_text(json.dumps(content))
    words += ["--find_micro_batch", "--max_steps", "1"]
    monkeypatch.setattr(micro_batch, "available_bytes", lambda: 400_000_000)
    run_here(words)
    said = capsys.readouterr().out
    found = re.search(r"find_micro_batch: (\d+) rows? per micro-step and rank, (\d+) micro-steps for the 64 rows", said)
    assert found, said
    micro, accumulation = map(int, found.groups())
    assert 1 < micro < 64
    assert micro * accumulation == 64
    assert f"64 rows of 24: {micro} × {accumulation} micro-steps" in said
    (checkpoint,) = (tmp_path / "out" / "saved_models" / "tiny").glob("step_*")
    engine = json.loads((checkpoint / "resolved.json").read_text())["deepspeed"]
    assert engine["train_micro_batch_size_per_gpu"] == micro

    monkeypatch.setattr(micro_batch, "Trials", None)  # a resumed run tries nothing
    run_here([*words[:-1], "2"])
    assert f"{micro} rows per micro-step and rank, {accumulation} micro-steps for the 64 rows of a step, as in" in (
        capsys.readouterr().out
    )


class FakeChild:
    exitcode = 0

    def join(self) -> None: ...

    def kill(self) -> None: ...


class FakePipe:
    def send(self, micro: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([Outcome.FITS], True),
        ([Outcome.RUNNING, Outcome.FITS], True),
        ([Outcome.TOO_LARGE], False),
        ([Outcome.LOST, Outcome.TOO_LARGE], False),
        ([Outcome.FAILED], None),
    ],
)
def test_ranks_agree_on_whether_a_size_fits(
    others: list[Outcome], expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank's child fits; another rank reports `others`, one after the other."""
    reports = iter(others)
    monkeypatch.setattr(micro_batch, "await_outcome", lambda *_: (Outcome.FITS, 7))
    monkeypatch.setattr(micro_batch, "EXCHANGE_SECONDS", 0.0)
    monkeypatch.setattr("training.runtime.collectives.all_ranks_gather", lambda own: [own, (next(reports), 9)])
    trials = Trials(resolve(write_project(tmp_path)), RankInfo(0, 0, 2, 2), 100, lambda *_: None)
    trials._child = (FakeChild(), FakePipe())  # type: ignore[assignment]
    if expected is None:
        with pytest.raises(UserError, match="the process of rank 1 that tried 4 rows per micro-step failed"):
            trials.all_ranks_fits(4)
        return
    assert trials.all_ranks_fits(4) is expected
    assert trials.peaks == ({4: 9} if expected else {})
    assert (trials._child is None) is not expected  # a child that failed is replaced


def test_a_child_that_runs_out_of_gpu_memory_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes: list[int] = []

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(micro_batch.os, "_exit", leave)
    for name in ("end_with_parent", "guard_compiles", "send_logs", "share_cores", "limit_memory"):
        monkeypatch.setattr(micro_batch, name, lambda *_, **__: 0)
    monkeypatch.setattr(micro_batch.collectives, "start", fail)
    monkeypatch.setenv("MASTER_PORT", "1")
    settings = resolve(write_project(tmp_path))
    with pytest.raises(Left):
        micro_batch.run_trials(settings, RankInfo(0, 0, 1, 1), 1, 100, FakePipe())  # type: ignore[arg-type]
    assert codes == [micro_batch.NO_MEMORY]

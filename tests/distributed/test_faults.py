"""Faults put into real ranks: signals, gradients that are no numbers, spikes, stuck ranks, dead readers, full disks."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.processes import STOPPED_EXIT_CODE, STUCK_EXIT_CODE
from tests.distributed.test_ranks import losses, name_vocabulary, without_dropout
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project
from training.checkpoint import CheckpointFolder, read_state
from training.export import read_weights

BATCH = 8  # rows a step in tests.support's project


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "out" / "saved_models" / "tiny")


def weights(folder: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    found = checkpoints(folder)
    return read_weights(found.folder / found.choose(tag))


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    number: signal.Signals, rank_server: RankServer, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = [*write_project(whole, zero_optimization={"stage": 1}), "--max_steps", "30"]
    assert rank_server.run(words, 2, whole).codes == [0, 0]

    words = [*write_project(broken, zero_optimization={"stage": 1}), "--max_steps", "30"]
    slow = [{"kind": "slow_steps", "seconds": 0.3}]
    rows = broken / "out" / "runs" / "tiny" / "metrics.jsonl"
    sent = [{"after": 0.0, "once": str(rows), "signal": int(number), "ranks": [1]}]
    stopped = rank_server.run(words, 2, broken, faults=slow, signals=sent)
    assert stopped.codes == [STOPPED_EXIT_CODE] * 2, stopped.text
    assert "stopped at step" in stopped.text
    assert rank_server.run(words, 2, broken).codes == [0, 0]
    assert losses(broken) == losses(whole)
    assert_same_weights(weights(broken), weights(whole))


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_stop_gives_up_a_long_accumulation(stage: int, ranks: int, rank_server: RankServer, tmp_path: Path) -> None:
    """Between micro-steps, not only between steps: a step of many can take longer than a scheduler waits."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    flags = ["--max_steps", "5"]
    assert rank_server.run([*write_project(whole, **options), *flags], ranks, whole).codes == [0] * ranks
    words = [*write_project(broken, **options), *flags]
    asked = [{"kind": "stop_in_accumulation", "next_sample": 4 * BATCH, "rank": ranks - 1}]
    stopped = rank_server.run(words, ranks, broken, faults=asked)
    assert stopped.codes == [STOPPED_EXIT_CODE] * ranks, stopped.text
    assert "stopped at step 3 " in stopped.text
    assert rank_server.run(words, ranks, broken).codes == [0] * ranks
    assert losses(broken) == losses(whole)
    assert_same_weights(weights(broken), weights(whole))


# In fp16 with a scale that does not adapt: one that does is lowered first, and the step tried again.
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}


@pytest.mark.parametrize(
    ("precision", "value", "stage"),
    [
        *(("fp32", value, stage) for value in ("nan", "inf") for stage in (0, 1, 2, 3)),
        ("bf16", "nan", 1),
        ("fp16", "inf", 1),
        *(pytest.param("bf16", "nan", stage, marks=pytest.mark.slow) for stage in (0, 3)),
        *(pytest.param("fp16", "inf", stage, marks=pytest.mark.slow) for stage in (0, 3)),
    ],
)
def test_no_rank_applies_a_step_that_is_not_finite_on_one(
    stage: int, precision: str, value: str, rank_server: RankServer, tmp_path: Path
) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage}, **PRECISIONS[precision])
    bad = {"kind": "not_a_number", "rank": 1, "value": value, "next_samples": [3 * BATCH, 4 * BATCH]}
    flags = ["--save_every_steps", "1", "--max_steps", "4"]
    outcome = rank_server.run([*words, *flags], 2, tmp_path, faults=[bad, {"kind": "allow_fp16"}])
    assert outcome.codes == [0, 0], outcome.text
    assert "no rank applied it (2 in a row)" in outcome.text
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [1, 2, 3, 4]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())
    samples = [row["samples"] for row in read_metrics(tmp_path, "train")]
    assert samples == [BATCH, 2 * BATCH, 5 * BATCH, 6 * BATCH]
    for rank in (0, 1):
        file = tmp_path / "out" / "runs" / "tiny" / f"bad_batches_rank_{rank}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [len(row["rows"]) for row in rows] == [BATCH // 2] * 2


def test_rows_that_give_no_step_are_behind_a_run_that_ends_with_them(rank_server: RankServer, tmp_path: Path) -> None:
    """The last step's checkpoint is there already, but from before them: a run that goes on from it is not finished."""
    words = [*write_project(tmp_path, zero_optimization={"stage": 1}), "--save_every_steps", "7"]
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"num_epochs": 100', '"num_epochs": 1'))
    bad = {"kind": "not_a_number", "rank": 1, "next_samples": [8 * BATCH]}
    outcome = rank_server.run(words, 2, tmp_path, faults=[bad])
    assert outcome.codes == [0, 0], outcome.text
    assert checkpoints(tmp_path).tags() == ["step_00000007"]
    assert read_state(checkpoints(tmp_path).folder / "step_00000007").samples == 8 * BATCH
    assert not list(checkpoints(tmp_path).folder.glob("*.damaged"))
    again = rank_server.run(words, 2, tmp_path)
    assert "finished already, at step 7" in again.text


def test_a_step_that_only_lowers_the_loss_scale_spoils_no_figure(rank_server: RankServer, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    words = [*write_project(tmp_path, fp16=fp16), "--precision", "fp16", "--print_steps", "4", "--max_steps", "4"]
    kinds = ("not_a_number", "loss_is_not_a_number")
    faults = [{"kind": "allow_fp16"}, {"kind": "claim_fp16"}]
    faults += [{"kind": kind, "next_samples": [3 * BATCH]} for kind in kinds]
    outcome = rank_server.run(words, 1, tmp_path, faults=faults)
    assert outcome.codes == [0], outcome.text
    (row,) = read_metrics(tmp_path, "train")
    assert row["skipped_steps"] == 1.0
    assert row["window_steps"] == 4.0
    assert 0 < row["loss"] < 10


def test_bad_steps_in_a_row_end_the_run(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "20", "--max_bad_steps", "3", "--save_every_steps", "2"]
    bad = {"kind": "not_a_number", "next_samples": [BATCH * index for index in range(4, 20)]}
    outcome = rank_server.run(words, 1, tmp_path, faults=[bad])
    assert outcome.codes == [2], outcome.text
    assert "--max_bad_steps" in outcome.text
    assert "bad_batches_rank_0.jsonl" in outcome.text
    assert checkpoints(tmp_path).newest_valid() == "step_00000003", "the steps before them are not lost"
    skips = f"[[{3 * BATCH}, {6 * BATCH}]]"
    assert f"write {skips} to {checkpoints(tmp_path).folder}/skips.json" in outcome.text
    (checkpoints(tmp_path).folder / "skips.json").write_text(skips)
    assert rank_server.run([*words, "--max_steps", "5"], 1, tmp_path, faults=[]).codes == [0]
    assert [row["samples"] for row in read_metrics(tmp_path, "train")][3:] == [7 * BATCH, 8 * BATCH]


def test_a_spike_is_told_and_rolled_back(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "45", "--save_every_steps", "10"]
    without_dropout(tmp_path)
    spoilt = [{"kind": "spoil_weights", "next_sample": 38 * BATCH}]
    told = rank_server.run([*words, "--job_name", "told"], 2, tmp_path, faults=spoilt)
    assert told.codes == [0, 0], told.text
    assert "loss spike at step 38" in told.text
    back = rank_server.run([*words, "--job_name", "back", "--on_spike", "rollback"], 2, tmp_path, faults=spoilt)
    assert back.codes == [0, 0], back.text
    assert "went back to step 32" in back.text
    rows = read_metrics(tmp_path, "train", job="back")
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert max(row["loss"] for row in rows[30:]) < rows[0]["loss"]
    skipped = [row["samples"] for row in rows if row["step"] in (37, 38)]
    assert skipped == [37 * BATCH, 39 * BATCH], "the batch of the spike is left out"
    state = json.loads((tmp_path / "out/saved_models/back/step_00000045/bert_pretraining.json").read_text())
    assert state["skips"] == [[37 * BATCH, 38 * BATCH]]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_slow_rank_is_told_by_work_that_is_its_own(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    """The fast rank waits in the backward pass, at stage 3 in the forward pass too, so both seem to take as long."""
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--print_steps", "4", "--max_steps", "8"]
    slow = [{"kind": "slow_forward", "rank": 1, "seconds": 0.05}]
    assert rank_server.run(words, 2, tmp_path, faults=slow).codes == [0, 0]
    last = read_metrics(tmp_path, "train")[-1]
    assert last["slowest_rank"] == 1.0
    assert last["slowest_over_fastest_rank"] > 1.5


@pytest.mark.parametrize("how", ["asleep", "stopped"])
def test_a_stuck_rank_is_named(how: str, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "0.05"]
    stuck = {"kind": "hang", "rank": 1, "next_sample": 3 * BATCH, "how": how}
    outcome = rank_server.run(
        words, 2, tmp_path, faults=[stuck, {"kind": "short_collectives", "seconds": 1}], grace=2.0
    )
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text
    if how == "asleep":  # a stopped process cannot tell where it is
        assert "is stuck in data_wait at step 2" in outcome.text


def test_the_first_to_leave_lets_the_others_speak(rank_server: RankServer, tmp_path: Path) -> None:
    """Three ranks: one is stuck, one has to tell, and the third must not take both down before that."""
    words = [*write_project(tmp_path, train_batch_size=6), "--max_steps", "10", "--stuck_after_minutes", "0.07"]
    faults = [{"kind": "hang", "rank": 1, "next_sample": 18}, {"kind": "slow_to_tell", "rank": 0, "seconds": 1.5}]
    outcome = rank_server.run(words, 3, tmp_path, faults=faults, grace=0.2)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text


def test_a_rank_that_is_stuck_before_the_loop_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "0.1"]
    outcome = rank_server.run(words, 2, tmp_path, faults=[{"kind": "hang_in_build", "rank": 1}], grace=2.0)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert "rank 1 (host" in outcome.text
    assert "is stuck in preparing the model" in outcome.text


def test_a_rank_that_is_stuck_in_the_engine_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    """In deepspeed.initialize() no rank has come further than another, and a collective must not give up first."""
    words = [*write_project(tmp_path), "--max_steps", "10", "--stuck_after_minutes", "0.05"]
    faults = [{"kind": "hang_in_initialize", "rank": 0}, {"kind": "short_collectives", "seconds": 1}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, grace=2.0)
    assert outcome.codes[1] == STUCK_EXIT_CODE, outcome.text
    assert "rank 0 (host" in outcome.text
    assert "is stuck in building the engine at step 0, " in outcome.text
    assert "tests/faults.py:" in outcome.text, "the line it is at"
    assert "rank 1 (host" not in outcome.text
    assert "Traceback" not in outcome.text


# A compiler that does not come to its end, and one that only pretends to compile.
ENDLESS = """#!/bin/sh
touch "$(dirname "$0")/started"
exec sleep 5
"""
PRETENDING = """#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then touch "$2"; fi
    shift
done
"""


def test_a_run_that_was_killed_while_it_compiled_keeps_nobody_waiting(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / "tiny.cpp").write_text("")
    (folder / "c++").write_text(ENDLESS)
    (folder / "c++").chmod(0o755)
    compiling = {"kind": "compile", "folder": str(folder)}
    killed = rank_server.run(words, 2, tmp_path, faults=[{**compiling, "dies": True}])
    assert -signal.SIGKILL in killed.codes, killed.text
    assert (folder / "lock").exists()
    (folder / "c++").unlink()  # still running
    (folder / "c++").write_text(PRETENDING)
    (folder / "c++").chmod(0o755)
    again = rank_server.run(words, 2, tmp_path, faults=[compiling], timeout=30)
    assert again.codes == [0, 0], again.text
    assert again.text.count("extension/lock: was left by a run that died while it compiled") == 1
    assert not (folder / "lock").exists()


def test_ranks_that_never_come_are_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, train_batch_size=12), "--max_steps", "2"]
    faults = [{"kind": "late", "rank": rank, "seconds": 600} for rank in (1, 3)]
    faults.append({"kind": "short_join", "seconds": 3})
    outcome = rank_server.run(words, 4, tmp_path, faults=faults, grace=1.0)
    assert outcome.codes[0] == STUCK_EXIT_CODE, outcome.text
    assert outcome.text.count("error: ") == 1
    assert "error: 2 of the 4 ranks did not come to 127.0.0.1:" in outcome.text
    assert f"within 3 s: rank 1, 3. The others run on {socket.gethostname()}; look at its log" in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.slow  # the others leave it to rank 0 to speak, for some seconds
def test_a_first_rank_that_never_comes_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    faults = [{"kind": "late", "rank": 0, "seconds": 600}, {"kind": "short_join", "seconds": 2}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, grace=1.0)
    assert outcome.codes[1] == STUCK_EXIT_CODE, outcome.text
    assert "error: rank 0 did not come to 127.0.0.1:" in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting_for_a_rank(number: int, rank_server: RankServer, tmp_path: Path) -> None:
    """Inside a call during which Python runs no handler."""
    words = [*write_project(tmp_path), "--max_steps", "2"]
    late = [{"kind": "late", "rank": 1, "seconds": 600}]
    sent = [{"after": 3.0, "signal": int(number), "ranks": [0]}]
    outcome = rank_server.run(words, 2, tmp_path, faults=late, signals=sent, grace=1.0)
    assert outcome.codes[0] == STOPPED_EXIT_CODE, outcome.text
    assert outcome.seconds < 12
    assert outcome.text.count("stopped before the first step") == 1
    assert "Traceback" not in outcome.text
    assert not (tmp_path / "out" / "runs").exists()


def test_a_signal_while_a_rank_builds(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    stuck = [{"kind": "hang_in_build", "rank": 1}]
    outcome = rank_server.run(words, 2, tmp_path, faults=stuck, signals=[{"after": 5.0, "signal": 15, "ranks": [1]}])
    assert outcome.codes == [STOPPED_EXIT_CODE] * 2, outcome.text
    assert outcome.seconds < 12
    assert "Traceback" not in outcome.text


def test_a_reader_that_dies_takes_the_run_down_with_its_own_message(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "40", "--save_every_steps", "100", "--ckpt_to_save", "99"]
    lost = {"kind": "reader_dies", "rank": 1, "name": "wiki_training_0.hdf5", "reads": 3}
    outcome = rank_server.run(words, 2, tmp_path, faults=[lost])
    assert outcome.codes == [2, 2], outcome.text
    assert outcome.text.count("error: ") == 1
    assert "wiki_training_0.hdf5: is damaged or incomplete" in outcome.text
    assert "Traceback" not in outcome.text
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None, "what was trained before it is saved"
    assert int(newest[-8:]) == len(losses(tmp_path)) + 1 or int(newest[-8:]) == len(losses(tmp_path))


LOST_DATA = {
    "at once": {"name": "wiki_training_0.hdf5", "reads": 0, "since": "read_steps"},
    "not known ahead": {"name": "wiki_training_0.hdf5", "reads": 1, "since": "read_steps"},
    "in validation": {"name": "wiki_test_0.hdf5", "reads": 0, "since": "validate"},
}


@pytest.mark.parametrize("when", LOST_DATA)
def test_a_reader_that_dies_unexpectedly_takes_the_run_down_alike(
    when: str, rank_server: RankServer, tmp_path: Path
) -> None:
    """The other rank has its batch and would wait for this one in the step."""
    words = [*write_project(tmp_path), "--max_steps", "40", "--validate_every_steps", "3", "--ckpt_to_save", "99"]
    faults = [{"kind": "reader_dies", "rank": 1, **LOST_DATA[when]}]
    if when == "not known ahead":
        faults.append({"kind": "slow_reader", "rank": 1, "seconds": 0.3})
    outcome = rank_server.run(words, 2, tmp_path, faults=faults)
    assert outcome.codes == [2, 2], outcome.text
    assert outcome.text.count("error: ") == 1
    assert f"{LOST_DATA[when]['name']}: is damaged or incomplete" in outcome.text
    assert "Traceback" not in outcome.text
    if when == "in validation":
        assert checkpoints(tmp_path).newest_valid() == "step_00000003", "what was trained before it is saved"


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of two megabytes: a real one where we may mount, for its errors are what is tested."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    small_disk: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    words = [*write_project(tmp_path), "--output_dir", str(small_disk / "out"), "--save_every_steps", "4"]
    assert rank_server.run([*words, "--max_steps", "4"], 2, tmp_path).codes == [0, 0]
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 100_000))
    patience = [{"kind": "patience", "seconds": 1.0}]
    full = rank_server.run([*words, "--max_steps", "12"], 2, tmp_path, faults=patience)
    assert full.codes[0] == 2, full.text
    assert "step_00000008 was not saved" in full.text
    assert "make room for" in full.text
    assert "the last good checkpoint is step_00000004" in full.text
    assert "Traceback" not in full.text
    found = CheckpointFolder(small_disk / "out" / "saved_models" / "tiny")
    assert found.newest_valid() == "step_00000004"
    filler.unlink()
    assert rank_server.run([*words, "--max_steps", "12"], 2, tmp_path).codes == [0, 0]
    assert found.newest_valid() == "step_00000012"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_disk_that_fills_up_while_writing(
    stage: int, small_disk: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    """Space for some files only: the estimate is fooled, the write itself fails on one rank, and both go on."""
    words = [
        *write_project(tmp_path, zero_optimization={"stage": stage}),
        "--output_dir",
        str(small_disk / "out"),
        "--save_every_steps",
        "4",
    ]
    assert rank_server.run([*words, "--max_steps", "4"], 2, tmp_path).codes == [0, 0]
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 100_000))
    faults = [{"kind": "patience", "seconds": 1.0}, {"kind": "believe_in_space"}]
    full = rank_server.run([*words, "--max_steps", "12"], 2, tmp_path, faults=faults)
    assert full.codes[0] == 2, full.text
    assert "No space left on device" in full.text
    assert "Traceback" not in full.text
    assert CheckpointFolder(small_disk / "out" / "saved_models" / "tiny").newest_valid() == "step_00000004"


def test_a_log_that_cannot_be_written_does_not_end_the_run(
    small_disk: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    words = write_project(tmp_path)
    run = tmp_path / "out" / "runs"
    run.parent.mkdir()
    run.symlink_to(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    outcome = rank_server.run([*words, "--max_steps", "5"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert "No space left on device" in outcome.text
    assert outcome.text.count("No space left on device") < 4, "told once a sink, not once a step"
    assert checkpoints(tmp_path).newest_valid() == "step_00000005"


@pytest.mark.parametrize("how", ["full", "pipe"])
def test_an_output_that_is_lost_does_not_cost_the_run(how: str, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "4", "--save_every_steps", "2"]
    outcome = rank_server.run(words, 1, tmp_path, faults=[{"kind": "lose_output", "how": how}])
    assert outcome.codes == [0], outcome.text
    assert outcome.text.count("standard output cannot be written any more") == 1
    assert "could not be written" not in outcome.text
    assert checkpoints(tmp_path).tags() == ["step_00000002", "step_00000004"]


def test_a_stop_without_any_output_saves(rank_server: RankServer, tmp_path: Path) -> None:
    """Ctrl-C to `… 2>&1 | tee log` ends tee first: nothing can be said, and all is to be saved."""
    words = [*write_project(tmp_path), "--max_steps", "100"]
    faults = [{"kind": "lose_output", "how": "pipe", "both": True}, {"kind": "stop_at", "next_sample": 5 * BATCH}]
    outcome = rank_server.run(words, 1, tmp_path, faults=faults)
    assert outcome.codes == [STOPPED_EXIT_CODE]
    assert checkpoints(tmp_path).newest_valid() == "step_00000005"
    assert len(losses(tmp_path)) == 5


def test_a_stop_waits_for_the_checkpoint_that_is_being_committed(rank_server: RankServer, tmp_path: Path) -> None:
    """Asked to stop right after a save, while rank 0 still takes digests: it must be there when the ranks leave."""
    words = [*write_project(tmp_path, train_micro_batch_size_per_gpu=1), "--max_steps", "30", "--save_every_steps", "3"]
    faults = [{"kind": "slow_commit", "seconds": 3.0}, {"kind": "stop_in_commit", "step": 3}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults)
    assert outcome.codes == [STOPPED_EXIT_CODE] * 2, outcome.text
    newest = checkpoints(tmp_path).newest_valid()
    assert newest is not None
    assert f"stopped at step {int(newest[-8:])} " in outcome.text


def test_a_folder_with_no_sound_checkpoint_is_not_begun_anew(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    assert rank_server.run(words, 1, tmp_path).codes == [0]
    (checkpoints(tmp_path).folder / "step_00000002" / "mp_rank_00_model_states.pt").write_bytes(b"gone")
    outcome = rank_server.run([*words[:-1], "4"], 1, tmp_path)
    assert outcome.codes == [2]
    assert "none that is sound" in outcome.text
    assert len(read_metrics(tmp_path, "train")) == 2
    (checkpoints(tmp_path).folder / "step_00000002").rename(checkpoints(tmp_path).folder / "step_00000002.damaged")
    assert "none that is sound" in rank_server.run([*words[:-1], "4"], 1, tmp_path).text


def test_a_changed_decay_is_told_and_taken(rank_server: RankServer, tmp_path: Path) -> None:
    """A load would bring back the old one."""
    words = write_project(tmp_path, zero_optimization={"stage": 1})
    assert rank_server.run([*words, "--max_steps", "2"], 2, tmp_path).codes == [0, 0]
    strong = {"type": "AdamW", "params": {"weight_decay": 100.0}}
    write_project(tmp_path, zero_optimization={"stage": 1}, optimizer=strong, gradient_clipping=0.5)
    outcome = rank_server.run([*words, "--max_steps", "12"], 2, tmp_path)
    assert outcome.codes == [0, 0], outcome.text
    assert "changed since step_00000002: optimizer was" in outcome.text
    name = "bert.pooler.dense_act.weight"
    old, new = (float(weights(tmp_path, tag)[name].detach().norm()) for tag in ("step_00000002", None))
    assert new < 0.5 * old


def test_a_changed_recipe_is_told(rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path)
    assert rank_server.run([*words, "--max_steps", "2"], 1, tmp_path).codes == [0]
    outcome = rank_server.run([*words, "--max_steps", "3", "--rewarmup", "--time_budget", "1h"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert "changed since step_00000002: rewarmup was False, is True" in outcome.text
    assert "changed since step_00000002: time_budget was None, is '1h'" in outcome.text


def test_a_stop_in_the_last_validation_is_made_up_for(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--keep_best", "--max_steps", "3"]
    name_vocabulary(tmp_path)
    stopped = rank_server.run(words, 2, tmp_path, faults=[{"kind": "stop_in_validation", "rank": 1}])
    assert stopped.codes == [STOPPED_EXIT_CODE] * 2, stopped.text
    assert checkpoints(tmp_path).newest_valid() == "step_00000003"
    assert checkpoints(tmp_path).best() is None
    for _ in range(2):  # the second start finds that nothing is missing
        again = rank_server.run(words, 2, tmp_path)
        assert again.codes == [0, 0], again.text
    (row,) = read_metrics(tmp_path, "validation")
    best = checkpoints(tmp_path).best()
    assert best is not None
    assert (best.tag, best.mlm_loss) == ("step_00000003", row["mlm_loss"])
    events = EventAccumulator(str(tmp_path / "out" / "runs" / "tiny"), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors("guesses/text_summary")] == [3]
    for figure in ("final/validation/mlm_loss", "final/train/tokens"):
        assert len(events.Scalars(figure)) == 1
    assert rank_server.run([*words[:-1], "4"], 2, tmp_path, faults=[{"kind": "worse_validation"}]).codes == [0, 0]
    assert checkpoints(tmp_path).best() == best


def test_two_runs_in_one_folder(rank_server: RankServer, tmp_path: Path) -> None:
    from training.lock import lock_folder

    words = [*write_project(tmp_path), "--max_steps", "2"]
    with lock_folder(tmp_path / "out" / "saved_models" / "tiny"):
        outcome = rank_server.run(words, 1, tmp_path)
    assert outcome.codes == [2]
    assert "another run is writing there (process" in outcome.text
    assert rank_server.run(words, 1, tmp_path).codes == [0]

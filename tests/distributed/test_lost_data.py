"""Data that is lost under a reader, disks that are full, and an output that nobody reads."""

import os
from pathlib import Path

import pytest

from tests.distributed.runs import checkpoints
from tests.distributed.test_ranks import losses
from tests.rank_server import RankServer
from tests.support import write_project
from training.checkpoints.folder import CheckpointFolder


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
    "at once": {"name": "wiki_training_0.hdf5", "reads": 0, "since": "step"},
    "not known ahead": {"name": "wiki_training_0.hdf5", "reads": 1, "since": "step"},
    "in validation": {"name": "wiki_test_0.hdf5", "reads": 0, "since": "validation"},
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
    assert ": free " in full.text
    assert "the last valid checkpoint is step_00000004" in full.text
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
    """Space for some files only: the estimate is too low, the write fails on one rank, and both ranks continue."""
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
    assert outcome.text.count("No space left on device") < 4, "reported once per sink, not once per step"
    assert checkpoints(tmp_path).newest_valid() == "step_00000005"


@pytest.mark.parametrize("how", ["full", "pipe"])
def test_an_output_that_is_lost_does_not_cost_the_run(how: str, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "4", "--save_every_steps", "2"]
    outcome = rank_server.run(words, 1, tmp_path, faults=[{"kind": "lose_output", "how": how}])
    assert outcome.codes == [0], outcome.text
    assert outcome.text.count("standard output can no longer be written") == 1
    assert "could not be written" not in outcome.text
    assert checkpoints(tmp_path).tags() == ["step_00000002", "step_00000004"]

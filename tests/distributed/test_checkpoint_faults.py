"""Checkpoints under faults: files that are missing, damaged or unseen, pointers left behind, disks without a byte."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from common.processes import STOPPED_EXIT_CODE
from tests.distributed.runs import BATCH, checkpoints, weights
from tests.distributed.test_ranks import losses, without_dropout
from tests.rank_server import RankServer
from tests.support import make_rows, read_metrics, tiny_words, write_nvidia_shard, write_project
from training.checkpoints.folder import Retention
from training.checkpoints.manifest import find_damage, write_manifest
from training.checkpoints.state import Best, Skips, read_state, write_skips
from training.checkpoints.writer import CheckpointWriter
from training.settings.flags import read_arguments

EVERY_TWO = ["--save_every_steps", "2"]


def test_a_file_that_rank_0_does_not_see_fails_the_save(rank_server: RankServer, tmp_path: Path) -> None:
    """As on machines whose --output_dir is a disk of their own."""
    words = [*write_project(tmp_path, zero_optimization={"stage": 1}), "--max_steps", "2"]
    faults = [{"kind": "file_elsewhere"}, {"kind": "patience", "seconds": 0.1}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults)
    assert outcome.codes[0] == 2, outcome.text
    assert "rank 1 wrote" in outcome.text
    assert "must be on a file system that all machines share" in outcome.text
    assert "Traceback" not in outcome.text
    assert checkpoints(tmp_path).tags() == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_manifest_without_some_ranks_file_is_none(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--max_steps", "1"]
    assert rank_server.run(words, 2, tmp_path).codes == [0, 0]
    folder = checkpoints(tmp_path).folder / "step_00000001"
    assert find_damage(folder) is None
    names = [path.name for path in folder.glob("*.pt")]
    assert len(names) == (4 if stage == 3 else 3)
    for name in names:
        shutil.copytree(folder, tmp_path / "copy")
        (tmp_path / "copy" / name).unlink()
        (tmp_path / "copy" / "manifest.json").unlink()
        write_manifest(tmp_path / "copy")
        assert "is missing in the folder" in (find_damage(tmp_path / "copy") or ""), name
        shutil.rmtree(tmp_path / "copy")


def test_a_folder_whose_name_is_a_pattern(rank_server: RankServer, tmp_path: Path) -> None:
    folder = tmp_path / "b*[x]?"
    words = [*write_project(folder), "--job_name", "a[1]"]
    assert rank_server.run([*words, "--max_steps", "2"], 1, folder).codes == [0]
    outcome = rank_server.run([*words, "--max_steps", "4"], 1, folder)
    assert outcome.codes == [0], outcome.text
    assert "a[1]/step_00000002" in outcome.text
    rows = read_metrics(folder, "train", job="a[1]")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["loss"] < rows[0]["loss"] + 0.1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _write(text: str) -> Callable[[Path], None]:
    return lambda path: (path.write_text(text), None)[1]


MODEL = "mp_rank_00_model_states.pt"
# What is damaged, how, and what is said of it.
DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": (MODEL, _cut, "but manifest.json lists"),
    "flipped": (MODEL, _flip, "does not match its checksum"),
    "missing": (MODEL, Path.unlink, f"{MODEL} is missing"),
    "a torn manifest": ("manifest.json", _write("{"), "manifest.json cannot be used"),
    "a manifest of nothing": ("manifest.json", _write('{"files": {"a": {}}}'), "a is missing"),
    "a manifest of words": ("manifest.json", _write('{"files": {"model.json": "x"}}'), "cannot be used"),
    "a manifest without end": ("manifest.json", _write("[" * 100_000), "manifest.json cannot be used"),
    "an enormous size": (
        "manifest.json",
        _write('{"files": {"model.json": {"size": 1e300, "sha256": ""}}}'),
        "but manifest.json lists 1e+300",
    ),
    "no manifest": ("manifest.json", Path.unlink, "it has no manifest.json"),
}

LIKE_OTHERS = ("flipped", "a manifest of nothing", "a manifest of words", "a manifest without end")


@pytest.fixture(scope="module")
def whole(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to step 6, left alone."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*write_project(folder), *EVERY_TWO, "--max_steps", "6"]
    for name in ("model.json", "deepspeed.json"):  # as an editor of Windows writes them
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes().replace(b"\n", b"\r\n"))
    outcome = rank_server.run(words, 1, folder)
    assert outcome.codes == [0], outcome.text
    return folder


def test_a_checkpoint_holds_the_configs_as_they_were(whole: Path) -> None:
    """The user's files byte for byte, and what came of them and of the flags."""
    for tag in checkpoints(whole).tags():
        saved = checkpoints(whole).folder / tag
        for name in ("model.json", "deepspeed.json"):
            assert (saved / name).read_bytes() == (whole / name).read_bytes()
        resolved = json.loads((saved / "resolved.json").read_text())
        flags, _ = read_arguments([*tiny_words(whole), *EVERY_TWO, "--max_steps", "6"])
        assert resolved["flags"] == json.loads(json.dumps(flags.values(), default=str))
        assert resolved["flags"]["seed"] == 42, "those that were not given too"
        given = json.loads((whole / "deepspeed.json").read_text(encoding="utf-8-sig"))
        assert given.items() <= resolved["deepspeed"].items()
        assert resolved["deepspeed"]["train_micro_batch_size_per_gpu"] == BATCH, "and what follows from them"
        state = read_state(saved)
        assert state.model_config["hidden_size"] == 32
        assert (state.recipe or {})["learning_rate"] == 0.003


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in DAMAGES]
)
def test_a_run_goes_on_past_a_damaged_checkpoint(
    damage: str, whole: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    name, spoil, reason = DAMAGES[damage]
    words = [*write_project(tmp_path), *EVERY_TWO, "--max_steps", "6"]
    shutil.copytree(whole / "out", tmp_path / "out")
    folder = checkpoints(tmp_path).folder
    shutil.rmtree(folder / "step_00000006")
    spoil(folder / "step_00000004" / name)
    outcome = rank_server.run(words, 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    skipped = [line for line in outcome.text.splitlines() if ": skipped, " in line]
    assert len(skipped) == 1, outcome.text
    assert "step_00000004: skipped, " in skipped[0]
    assert reason in skipped[0]
    assert f"from {folder / 'step_00000002'}" in outcome.text
    assert "step_00000004.damaged" in outcome.text
    assert (folder / "step_00000004.damaged").is_dir()
    assert checkpoints(tmp_path).tags() == ["step_00000002", "step_00000004", "step_00000006"]
    assert find_damage(folder / "step_00000004") is None
    assert losses(tmp_path) == losses(whole)


def test_a_kill_before_the_pointers_is_mended_by_the_next_start(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "16", "--validate_every_steps", "8", "--keep_best"]
    # Rows that are trained on: their loss falls from one validation to the next, which that of unseen noise need not.
    write_nvidia_shard(tmp_path / "data" / "wiki_test_0.hdf5", make_rows(37, 24, 4, seed=0))
    kill = {"kind": "kill", "stage": "pointer", "step": 16, "rank": 0}
    assert rank_server.run(words, 1, tmp_path, faults=[kill]).codes == [-9]
    folder = checkpoints(tmp_path).folder
    assert (folder / "latest").read_text() == "step_00000008"
    assert json.loads((folder / "best.json").read_text())["tag"] == "step_00000008"
    outcome = rank_server.run(words, 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert (folder / "latest").read_text() == "step_00000016"
    state, best = read_state(folder / "step_00000016"), json.loads((folder / "best.json").read_text())
    assert best["tag"] == state.best_tag == "step_00000016"
    assert best["mlm_loss"] == state.best_validation_loss
    assert not best["is_only_best"]


def test_a_checkpoint_that_vanished_is_replaced_by_the_next_newest(
    whole: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    words = [*write_project(tmp_path), "--job_name", "second", "--max_steps", "1"]
    first = shutil.copytree(whole / "out" / "saved_models" / "tiny", tmp_path / "first")
    vanish = {"kind": "origin_vanishes", "tag": "step_00000006", "rank": 0}
    outcome = rank_server.run([*words, "--load_training_checkpoint", str(first)], 2, tmp_path, faults=[vanish])
    assert outcome.codes == [0, 0], outcome.text
    assert f"from {first / 'step_00000004'}" in outcome.text


def fill(folder: Path) -> Path:
    """Not one byte is free."""
    (folder / "filler").write_bytes(b"x" * (os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize))
    assert os.statvfs(folder).f_bavail == 0
    return folder / "filler"


def test_a_disk_without_a_byte_at_the_start(small_disk: Path, rank_server: RankServer, tmp_path: Path) -> None:
    """The lock is taken, everything is trained, and a failed save is reported."""
    words = [*write_project(tmp_path), "--output_dir", str(small_disk / "out"), "--max_steps", "3"]
    filler = fill(small_disk)
    outcome = rank_server.run(words, 1, tmp_path, faults=[{"kind": "patience", "seconds": 0.5}])
    assert outcome.codes == [2], outcome.text
    assert "step_00000003 was not saved" in outcome.text
    assert "Traceback" not in outcome.text
    filler.unlink()
    assert rank_server.run(words, 1, tmp_path).codes == [0]


@pytest.mark.parametrize("stop", [None, 5], ids=["at the end", "on a request"])
def test_steps_to_repeat_are_counted_from_a_checkpoint_that_is_there(
    stop: int | None, rank_server: RankServer, tmp_path: Path
) -> None:
    """Not from one whose files were written, but which could not be committed in the background."""
    words = [*write_project(tmp_path), *EVERY_TWO, "--max_steps", "6"]
    faults: list[dict[str, object]] = [{"kind": "no_commit", "step": 4}, {"kind": "patience", "seconds": 0.1}]
    if stop is not None:
        faults.append({"kind": "stop_at", "next_sample": stop * BATCH})
    outcome = rank_server.run(words, 2, tmp_path, faults=faults)
    assert outcome.codes[0] == 2, outcome.text
    assert "the last valid checkpoint is step_00000002" in outcome.text
    lost = (stop or 6) - 2
    assert f"The same command resumes from step_00000002 and repeats {lost} steps" in outcome.text
    assert checkpoints(tmp_path).tags() == ["step_00000002"]


def test_a_disk_that_is_full_when_a_run_goes_back(small_disk: Path, rank_server: RankServer, tmp_path: Path) -> None:
    """The samples left out are kept in memory; the run does not end for a file that cannot be written.

    Its figures, which tell what it trained on, go to another disk.
    """
    (small_disk / "out").mkdir()
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (small_disk / "out" / "runs").symlink_to(tmp_path / "out" / "runs")
    words = [*write_project(tmp_path), "--max_steps", "40", "--save_every_steps", "10", "--on_spike", "rollback"]
    words += ["--keep_last", "2"]
    without_dropout(tmp_path)
    faults = [
        {"kind": "spoil_weights", "next_sample": 38 * BATCH},
        {"kind": "fill_disk", "next_sample": 38 * BATCH, "folder": str(small_disk)},
        {"kind": "patience", "seconds": 0.5},
    ]
    outcome = rank_server.run([*words, "--output_dir", str(small_disk / "out")], 1, tmp_path, faults=faults)
    assert "rolled back to step 32" in outcome.text
    assert "skips.json: cannot be written (No space left on device)" in outcome.text
    assert "step_00000040 was not saved" in outcome.text
    assert "Traceback" not in outcome.text
    rows = read_metrics(tmp_path, "train")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["samples"] for row in rows] == [number * BATCH for number in range(1, 42) if number != 38]


def test_pointers_that_cannot_be_written(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(small_disk)
    CheckpointWriter(small_disk).update_pointers("step_00000001", Retention(), Best("step_00000001", 1.0, False))
    write_skips(small_disk, Skips(((1, 2),)))
    assert capfd.readouterr().err.count("No space left on device") == 2


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_rollback_where_ranks_hold_parts(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--max_steps", "40"]
    without_dropout(tmp_path)
    spoilt = [{"kind": "spoil_weights", "next_sample": 38 * BATCH}]
    flags = ["--save_every_steps", "10", "--on_spike", "rollback"]
    outcome = rank_server.run([*words, *flags], 2, tmp_path, faults=spoilt)
    assert outcome.codes == [0, 0], outcome.text
    assert "rolled back to step 32" in outcome.text
    rows = read_metrics(tmp_path, "train")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(row["loss"] for row in rows[30:]) < rows[0]["loss"]


def test_a_loss_that_always_jumps_ends_the_run(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "45", "--save_every_steps", "10", "--on_spike", "rollback"]
    without_dropout(tmp_path)
    spoilt = [{"kind": "spoil_weights", "next_sample": 38 * BATCH, "always": True}]
    outcome = rank_server.run(words, 1, tmp_path, faults=spoilt)
    assert outcome.codes == [2], outcome.text
    assert outcome.text.count("rolled back to step 32") == 3
    assert "after 3 rollbacks to step 32" in outcome.text
    assert "Lower the learning rate" in outcome.text


def test_rollbacks_are_counted_over_restarts(rank_server: RankServer, tmp_path: Path) -> None:
    """And nothing else is: what somebody wrote into skips.json is left out, but is no rollback."""
    words = [*write_project(tmp_path), "--on_spike", "rollback", "--ckpt_to_save", "99"]
    without_dropout(tmp_path)
    assert rank_server.run([*words, "--max_steps", "4"], 1, tmp_path).codes == [0]
    by_hand = [[50 * BATCH, 51 * BATCH], [52 * BATCH, 53 * BATCH], [54 * BATCH, 55 * BATCH]]
    (checkpoints(tmp_path).folder / "skips.json").write_text(json.dumps(by_hand))
    words += ["--max_steps", "45", "--print_steps", "6"]
    spoilt = [{"kind": "spoil_weights", "next_sample": 36 * BATCH, "always": True}]
    killed = rank_server.run(words, 1, tmp_path, faults=[*spoilt, {"kind": "die_in_rollback", "number": 3}])
    assert killed.codes == [-signal.SIGKILL], killed.text
    assert killed.text.count("rolled back to step 4;") == 2
    lines = json.loads((checkpoints(tmp_path).folder / "skips.json").read_text())
    assert [line for line in lines if len(line) == 2] == by_hand
    assert [line[2] for line in lines if len(line) == 3] == ["rollback"] * 2
    again = rank_server.run(words, 1, tmp_path, faults=spoilt)
    assert again.codes == [2], again.text
    assert again.text.count("rolled back to step 4;") == 1
    assert "after 3 rollbacks to step 4" in again.text
    assert f"remove {checkpoints(tmp_path).folder}/skips.json" in again.text


@pytest.mark.parametrize("answer", [pytest.param("report", marks=pytest.mark.slow), "rollback"])
def test_a_spike_right_before_a_stop_is_told(answer: str, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "60", "--save_every_steps", "31", "--print_steps", "50"]
    without_dropout(tmp_path)
    faults = [
        {"kind": "spoil_weights", "next_sample": 38 * BATCH},
        {"kind": "stop_at", "next_sample": 40 * BATCH},
    ]
    outcome = rank_server.run([*words, "--on_spike", answer], 1, tmp_path, faults=faults)
    assert outcome.codes == [STOPPED_EXIT_CODE], outcome.text
    assert "loss spike at step 38" in outcome.text
    newest = checkpoints(tmp_path).newest_valid()
    assert newest == ("step_00000032" if answer == "rollback" else "step_00000040")


def test_a_stop_in_the_validation_that_is_made_up_for(whole: Path, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), *EVERY_TWO, "--max_steps", "6"]
    shutil.copytree(whole / "out", tmp_path / "out")
    lines = tmp_path / "out" / "runs" / "tiny" / "metrics.jsonl"
    rows = [line for line in lines.read_text().splitlines() if '"validation"' not in line]
    lines.write_bytes("\n".join([*rows, "[1]", "7", '{"step": "x"}', ""]).encode() + b"\xff\xfe\n")
    stopped = rank_server.run(words, 1, tmp_path, faults=[{"kind": "stop_in_validation"}])
    assert stopped.codes == [STOPPED_EXIT_CODE], stopped.text
    assert rank_server.run(words, 1, tmp_path).codes == [0]
    assert [row["step"] for row in read_metrics(tmp_path, "validation")] == [6]
    assert weights(tmp_path).keys() == weights(whole).keys()

"""Which checkpoints a run writes and keeps, and what DeepSpeed's own tools make of them."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.distributed.runs import checkpoints, weights
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project
from training.checkpoints.folder import read_lock

NO_EPOCHS = ["--ckpt_to_save", "99"]  # an epoch is eight steps


def steps(folder: Path) -> list[int]:
    return [int(tag.removeprefix("step_")) for tag in checkpoints(folder).tags()]


def test_every_kth_stays(rank_server: RankServer, tmp_path: Path) -> None:
    flags = ["--max_steps", "12", "--save_every_steps", "2", "--keep_last", "1", "--keep_every", "6", *NO_EPOCHS]
    outcome = rank_server.run([*write_project(tmp_path), *flags], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert steps(tmp_path) == [6, 12]


def test_chosen_epochs_and_the_end(rank_server: RankServer, tmp_path: Path) -> None:
    flags = ["--max_steps", "27", "--ckpt_to_save", "1"]
    outcome = rank_server.run([*write_project(tmp_path), *flags], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert steps(tmp_path) == [16, 27]


def test_by_the_clock(rank_server: RankServer, tmp_path: Path) -> None:
    flags = ["--max_steps", "10", "--save_every_minutes", "0.01", *NO_EPOCHS]
    slow = [{"kind": "slow_steps", "seconds": 0.25}]
    outcome = rank_server.run([*write_project(tmp_path), *flags], 1, tmp_path, faults=slow)
    assert outcome.codes == [0], outcome.text
    assert 3 <= len(steps(tmp_path)) <= 10
    assert steps(tmp_path)[-1] == 10


def test_a_damaged_one_does_not_count(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--keep_last", "2", *NO_EPOCHS]
    assert rank_server.run([*words, "--save_every_steps", "2", "--max_steps", "4"], 1, tmp_path).codes == [0]
    with next((checkpoints(tmp_path).folder / "step_00000004").glob("*.pt")).open("r+b") as stream:
        stream.truncate(100)
    outcome = rank_server.run([*words, "--save_every_steps", "5", "--max_steps", "5"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert ": skipped, " in outcome.text
    assert steps(tmp_path) == [2, 4, 5], "the two that are good, and the damaged one for its owner to see"


def test_one_in_use_and_a_copy_stay(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--save_every_steps", "2", "--keep_last", "1", *NO_EPOCHS]
    assert rank_server.run([*words, "--max_steps", "2"], 1, tmp_path).codes == [0]
    folder = checkpoints(tmp_path).folder
    with ExitStack() as stack:
        assert read_lock(folder / "step_00000002", stack)
        assert rank_server.run([*words, "--max_steps", "4"], 1, tmp_path).codes == [0]
        assert steps(tmp_path) == [2, 4]
    (folder / "step_00000002").rename(folder / "mine_99")
    outcome = rank_server.run([*words, "--max_steps", "6"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert f"from {folder / 'step_00000004'}" in outcome.text, "a name with a later step does not count"
    assert checkpoints(tmp_path).tags() == ["step_00000006", "mine_99"]
    assert checkpoints(tmp_path).choose(None) == "step_00000006"
    assert checkpoints(tmp_path).choose("mine_99") == "mine_99"


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_tool_reads_the_folder(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--max_steps", "2"]
    assert rank_server.run(words, 2, tmp_path).codes == [0, 0]
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(checkpoints(tmp_path).folder))  # by `latest`
    ours = weights(tmp_path)
    assert theirs.keys() <= ours.keys()
    assert len(theirs) > 20
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


def test_a_restart_keeps_the_rewarmed_schedule(rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path)
    assert rank_server.run([*words, "--max_steps", "3"], 1, tmp_path).codes == [0]
    begin = ["--load_training_checkpoint", str(checkpoints(tmp_path).folder), "--rewarmup"]
    for job, ends in (("whole", (5,)), ("parts", (2, 5))):
        for end in ends:
            outcome = rank_server.run([*words, *begin, "--job_name", job, "--max_steps", str(end)], 1, tmp_path)
            assert outcome.codes == [0], outcome.text
    whole, parts = (read_metrics(tmp_path, "train", job=job) for job in ("whole", "parts"))
    for key in ("step", "learning_rate", "loss"):
        assert [row[key] for row in parts] == [row[key] for row in whole]
    assert [row["step"] for row in whole] == [4, 5, 6, 7, 8]
    assert whole[0]["learning_rate"] < whole[-1]["learning_rate"], "it warms up again"


def test_a_schedule_that_is_over(rank_server: RankServer, tmp_path: Path) -> None:
    """Another run's checkpoint can begin nothing then; the run's own says that it is finished."""
    words = write_project(tmp_path)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"total_training_steps": 60', '"total_training_steps": 3'))
    for _ in range(2):
        outcome = rank_server.run(words, 1, tmp_path)
        assert outcome.codes == [0], outcome.text
    assert "finished already, at step 3" in outcome.text
    second = [*words, "--job_name", "second", "--load_training_checkpoint", str(checkpoints(tmp_path).folder)]
    outcome = rank_server.run(second, 1, tmp_path)
    assert outcome.codes == [2], outcome.text
    assert "step_00000003: is of step 3, but the model JSON's total_training_steps is 3" in outcome.text
    assert not (tmp_path / "out" / "saved_models" / "second").exists()
    assert rank_server.run([*second, "--rewarmup"], 1, tmp_path).codes == [0]
    assert [row["step"] for row in read_metrics(tmp_path, "train", job="second")] == [4, 5, 6]

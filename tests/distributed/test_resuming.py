"""What a start finds in a run's folder: changes are reported, and a checkpoint that does not fit is refused."""

from pathlib import Path

from tests.distributed.runs import BATCH, checkpoints, weights
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project


def test_a_folder_without_a_valid_checkpoint_is_refused(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    assert rank_server.run(words, 1, tmp_path).codes == [0]
    (checkpoints(tmp_path).folder / "step_00000002" / "mp_rank_00_model_states.pt").write_bytes(b"gone")
    outcome = rank_server.run([*words[:-1], "4"], 1, tmp_path)
    assert outcome.codes == [2]
    assert "none that is valid" in outcome.text
    assert len(read_metrics(tmp_path, "train")) == 2
    (checkpoints(tmp_path).folder / "step_00000002").rename(checkpoints(tmp_path).folder / "step_00000002.damaged")
    assert "none that is valid" in rank_server.run([*words[:-1], "4"], 1, tmp_path).text


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
    write_project(tmp_path, train_batch_size=4)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.003', '"learning_rate": 0.002'))
    flags = ["--max_steps", "3", "--rewarmup", "--time_budget", "1h", "--lr_schedule", "cosine"]
    outcome = rank_server.run([*words, *flags], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    lines_found = [line for line in outcome.text.splitlines() if line.startswith("changed since step_00000002: ")]
    assert sorted(line.split(": ", 1)[1] for line in lines_found) == [
        "batch was 8, is 4",
        "learning_rate was 0.003, is 0.002",
        "lr_schedule was 'LE', is 'cosine'",
        "rewarmup was False, is True",
        "time_budget was None, is '1h'",
    ]
    assert read_metrics(tmp_path, "train")[-1]["samples"] == 2 * BATCH + 4, "and the new batch is taken"


def test_a_start_from_an_older_checkpoint(rank_server: RankServer, tmp_path: Path) -> None:
    """The named checkpoint, not the newest. Once the new run has its own, a note says that it is not used."""
    words = write_project(tmp_path)
    assert rank_server.run([*words, "--max_steps", "4", "--save_every_steps", "2"], 1, tmp_path).codes == [0]
    first = checkpoints(tmp_path).folder
    words += ["--job_name", "second", "--load_training_checkpoint", str(first), "--load_checkpoint_id", "step_00000002"]
    begun = rank_server.run([*words, "--max_steps", "1"], 1, tmp_path)
    assert begun.codes == [0], begun.text
    assert f"from {first / 'step_00000002'}" in begun.text
    assert "is not used" not in begun.text
    (row,) = read_metrics(tmp_path, "train", job="second")
    assert (row["step"], row["samples"]) == (3, BATCH), "its step, and data from the first row"
    again = rank_server.run([*words, "--max_steps", "2"], 1, tmp_path)
    assert again.codes == [0], again.text
    (lines_found,) = [line for line in again.text.splitlines() if "is not used" in line]
    own = tmp_path / "out" / "saved_models" / "second" / "step_00000003"
    assert lines_found.startswith(f"note: --load_training_checkpoint: {first / 'step_00000002'} is not used, because")
    assert f"resumes from {own}; to start from {first / 'step_00000002'} again, pass another --job_name" in lines_found
    assert f"from {own}" in again.text


def test_two_runs_in_one_folder(rank_server: RankServer, tmp_path: Path) -> None:
    from training.runtime.lock import lock_folder

    words = [*write_project(tmp_path), "--max_steps", "2"]
    with lock_folder(tmp_path / "out" / "saved_models" / "tiny"):
        outcome = rank_server.run(words, 1, tmp_path)
    assert outcome.codes == [2]
    assert "another run is writing there (process" in outcome.text
    assert rank_server.run(words, 1, tmp_path).codes == [0]

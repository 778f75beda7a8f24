"""Steps that must not count: gradients and losses that are not finite, and loss spikes."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.runs import BATCH, checkpoints, weights
from tests.distributed.test_ranks import without_dropout
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project
from training.checkpoints.state import read_state

# fp16 with a static scale: a dynamic one would be lowered first, and the step repeated.
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}

SLOW = pytest.mark.slow
OTHER_VALUES = list(enumerate(("inf", "nan", "inf", "nan")))


@pytest.mark.parametrize(
    ("precision", "of", "value", "stage"),
    [
        *(("fp32", "gradient", value, stage) for stage, value in enumerate(("nan", "inf", "nan", "inf"))),
        *(("fp32", "loss", value, stage) for stage, value in enumerate(("inf", "nan", "inf", "nan"))),
        ("bf16", "gradient", "nan", 1),
        ("fp16", "loss", "inf", 1),
        *(pytest.param("fp32", "gradient", value, stage, marks=SLOW) for stage, value in OTHER_VALUES),
        *(pytest.param("fp32", "loss", value, stage, marks=SLOW) for value, stage in (("nan", 0), ("inf", 1))),
        *(pytest.param("bf16", "gradient", "nan", stage, marks=SLOW) for stage in (0, 3)),
        *(pytest.param("bf16", "loss", "inf", stage, marks=SLOW) for stage in (0, 1, 3)),
        *(pytest.param("fp16", "gradient", "inf", stage, marks=SLOW) for stage in (0, 1, 3)),
    ],
)
def test_no_rank_applies_a_step_that_is_not_finite_on_one(
    stage: int, precision: str, of: str, value: str, rank_server: RankServer, tmp_path: Path
) -> None:
    """A loss that is not finite counts even where its gradient is."""
    words = write_project(tmp_path, zero_optimization={"stage": stage}, **PRECISIONS[precision])
    bad = {"kind": "not_a_number", "rank": 1, "of": of, "value": value, "next_samples": [3 * BATCH, 4 * BATCH]}
    flags = ["--save_every_steps", "1", "--max_steps", "4"]
    outcome = rank_server.run([*words, *flags], 2, tmp_path, faults=[bad, {"kind": "allow_fp16"}])
    assert outcome.codes == [0, 0], outcome.text
    assert "no rank applied this step (2 in a row)" in outcome.text
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [1, 2, 3, 4]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())
    assert all(0 < row["loss"] < 10 for row in read_metrics(tmp_path, "train"))
    samples = [row["samples"] for row in read_metrics(tmp_path, "train")]
    assert samples == [BATCH, 2 * BATCH, 5 * BATCH, 6 * BATCH]
    for rank in (0, 1):
        file = tmp_path / "out" / "runs" / "tiny" / f"bad_batches_rank_{rank}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [len(row["rows"]) for row in rows] == [BATCH // 2] * 2


def test_a_run_that_ends_with_a_bad_step_is_finished(rank_server: RankServer, tmp_path: Path) -> None:
    """The checkpoint of the last step is from before the bad rows: resumed from it, the run is not finished."""
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


def test_a_step_that_only_lowers_the_loss_scale_changes_no_figure(rank_server: RankServer, tmp_path: Path) -> None:
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
    assert checkpoints(tmp_path).newest_valid() == "step_00000003", "the steps before are not lost"
    skips = f"[[{3 * BATCH}, {6 * BATCH}]]"
    assert f"write {skips} to {checkpoints(tmp_path).folder}/skips.json" in outcome.text
    (checkpoints(tmp_path).folder / "skips.json").write_text(skips)
    assert rank_server.run([*words, "--max_steps", "5"], 1, tmp_path, faults=[]).codes == [0]
    assert [row["samples"] for row in read_metrics(tmp_path, "train")][3:] == [7 * BATCH, 8 * BATCH]


def test_a_spike_is_reported_and_rolled_back(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "45", "--save_every_steps", "10"]
    without_dropout(tmp_path)
    spoilt = [{"kind": "spoil_weights", "next_sample": 38 * BATCH}]
    warned = rank_server.run([*words, "--job_name", "warned"], 2, tmp_path, faults=spoilt)
    assert warned.codes == [0, 0], warned.text
    assert "loss spike at step 38" in warned.text
    back = rank_server.run([*words, "--job_name", "back", "--on_spike", "rollback"], 2, tmp_path, faults=spoilt)
    assert back.codes == [0, 0], back.text
    assert "rolled back to step 32" in back.text
    rows = read_metrics(tmp_path, "train", job="back")
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert max(row["loss"] for row in rows[30:]) < rows[0]["loss"]
    skipped = [row["samples"] for row in rows if row["step"] in (37, 38)]
    assert skipped == [37 * BATCH, 39 * BATCH], "the batch of the spike is skipped"
    state = json.loads((tmp_path / "out/saved_models/back/step_00000045/bert_pretraining.json").read_text())
    assert state["skips"] == [[37 * BATCH, 38 * BATCH]]

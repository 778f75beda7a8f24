"""Stop requests to any rank at any point: all ranks agree, save and exit."""

import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.processes import STOPPED_EXIT_CODE
from tests.distributed.runs import BATCH, assert_same_weights, checkpoints, weights
from tests.distributed.test_ranks import losses, name_vocabulary
from tests.rank_server import RankServer
from tests.support import read_metrics, write_project


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
def test_a_stop_between_micro_steps_finishes_the_step(
    stage: int, ranks: int, rank_server: RankServer, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    flags = ["--max_steps", "5"]
    assert rank_server.run([*write_project(whole, **options), *flags], ranks, whole).codes == [0] * ranks
    words = [*write_project(broken, **options), *flags]
    asked = [{"kind": "stop_in_accumulation", "next_sample": 4 * BATCH, "rank": ranks - 1}]
    stopped = rank_server.run(words, ranks, broken, faults=asked)
    assert stopped.codes == [STOPPED_EXIT_CODE] * ranks, stopped.text
    assert "stopped at step 4 " in stopped.text
    assert rank_server.run(words, ranks, broken).codes == [0] * ranks
    assert losses(broken) == losses(whole)
    assert_same_weights(weights(broken), weights(whole))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting_for_a_rank(number: int, rank_server: RankServer, tmp_path: Path) -> None:
    """Inside a call during which Python runs no signal handler."""
    words = [*write_project(tmp_path), "--max_steps", "2"]
    file = str(tmp_path / "waiting")
    faults = [{"kind": "late", "rank": 1, "seconds": 600}, {"kind": "meeting", "rank": 0, "file": file}]
    sent = [{"once": file, "after": 0.5, "signal": int(number), "ranks": [0]}]
    outcome = rank_server.run(words, 2, tmp_path, faults=faults, signals=sent, grace=1.0)
    assert outcome.codes[0] == STOPPED_EXIT_CODE, outcome.text
    assert outcome.text.count("stopped before the first step") == 1
    assert "Traceback" not in outcome.text
    assert not (tmp_path / "out" / "runs").exists()


def test_a_signal_while_a_rank_builds(rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "2"]
    file = str(tmp_path / "hanging")
    sent = [{"once": file, "after": 1.0, "signal": 15, "ranks": [1]}]
    stuck = [{"kind": "hang_in_build", "rank": 1, "file": file}]
    outcome = rank_server.run(words, 2, tmp_path, faults=stuck, signals=sent)
    assert outcome.codes == [STOPPED_EXIT_CODE] * 2, outcome.text
    assert outcome.text.count("stopped before the first step") == 1
    assert "connection to another rank" not in outcome.text
    assert "Traceback" not in outcome.text


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
    assert len(events.Scalars("validation/mlm_loss")) == 1
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert rank_server.run([*words[:-1], "4"], 2, tmp_path, faults=[{"kind": "worse_validation"}]).codes == [0, 0]
    assert checkpoints(tmp_path).best() == best

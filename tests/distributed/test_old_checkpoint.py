"""A checkpoint and shards written by the first version of this project still load and train as they did then.

`tests/data/before_rooms`: 2 ranks, ZeRO stage 1, stopped after 3 of 6 steps, and the losses of all 6 steps of an
uninterrupted run. It contains `random_states.json`, which later versions ignore.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.runs import checkpoints
from tests.rank_server import RankServer
from tests.support import PROJECT, read_metrics, tiny_words

OLD = PROJECT / "tests" / "data" / "before_rooms"


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_an_old_checkpoint_is_resumed(num_ranks: int, rank_server: RankServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(OLD, folder)
    outcome = rank_server.run([*tiny_words(folder), "--max_steps", "6"], num_ranks, folder)
    assert outcome.codes == [0] * num_ranks, outcome.text
    assert f"from {checkpoints(folder).folder / 'step_00000003'}" in outcome.text
    losses = [row["loss"] for row in read_metrics(folder, "train")]
    expected = json.loads((OLD / "losses.json").read_text())[3:]
    # Each step has the same rows, but the ranks share them in another way, so the dropout of a row differs.
    assert losses == pytest.approx(expected, abs=0.01 if num_ranks == 2 else 0.1)
    assert not (checkpoints(folder).folder / "step_00000006" / "random_states.json").exists()

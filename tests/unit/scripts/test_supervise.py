"""The supervisor's command: on which ranks each start is made."""

import pytest

from common.supervision import Supervisor
from scripts.supervise import main

SCRIPT = "deepspeed_train.py"


@pytest.mark.parametrize(
    ("codes", "lost", "devices"),
    [
        ([0], None, ["0,1,2,3"]),
        ([2], None, ["0,1,2,3"]),  # a mistake that fewer ranks do not mend
        ([1, 0], 1, ["0,1,2,3", "0,2,3"]),
        ([1, 2, 0], None, ["0,1,2,3", "0,1,2", "0,1"]),  # three do not divide the batch, which is no restart
        ([1, 2, 2, 2], None, ["0,1,2,3", "0,1,2", "0,1", "0"]),
        ([1, 1], None, ["0,1,2,3", "0,1,2"]),
    ],
)
def test_each_restart_leaves_out_a_rank(
    codes: list[int], lost: int | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(self: Supervisor, command: list[str]) -> int:
        self.lost_rank = lost
        commands.append(command)
        return codes[len(commands) - 1]

    monkeypatch.setattr(Supervisor, "run", run)
    words = ["--max_restarts", "1", "--pause", "0", "--fewer_ranks", "--", "deepspeed", "--include=localhost:0,1,2,3"]
    assert main([*words, SCRIPT]) == codes[-1]
    assert [command[-2].rpartition(":")[2] for command in commands] == devices

"""Commands with one rank less: by number, by list, by hostfile."""

from pathlib import Path

import pytest

from common.errors import UserError
from common.rank_places import RankPlaces

SCRIPT = ["deepspeed_train.py", "--num_gpus", "9"]  # the script's own words are not the launcher's


def reduced(command: list[str], rank: int | None = None) -> list[str]:
    return RankPlaces.of([*command, *SCRIPT]).without(rank).command


def test_a_number() -> None:
    assert reduced(["deepspeed", "--num_gpus", "4"]) == ["deepspeed", "--num_gpus", "3", *SCRIPT]
    assert reduced(["deepspeed", "--num_gpus", "1"]) == ["deepspeed", "--num_gpus", "1", *SCRIPT]


@pytest.mark.parametrize(("rank", "left"), [(None, "localhost:0,2"), (0, "localhost:2,5"), (1, "localhost:0,5")])
def test_a_list_of_devices(rank: int | None, left: str) -> None:
    assert reduced(["deepspeed", "--include", "localhost:0,2,5"], rank) == ["deepspeed", "--include", left, *SCRIPT]
    assert reduced(["deepspeed", "--include=localhost:0,2,5"], rank) == ["deepspeed", "--include", left, *SCRIPT]


def test_a_hostfile(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two machines\nworker-0 slots=2\nworker-1 slots=2\n")
    command = ["deepspeed", "--hostfile", str(hosts)]
    expected = ["deepspeed", "--include", "worker-0:0@worker-1:0,1", *command[1:], *SCRIPT]
    assert reduced(command, 1) == expected
    again = RankPlaces.of(expected).without(None).command
    assert again == ["deepspeed", "--include", "worker-0:0@worker-1:0", *command[1:], *SCRIPT]
    last = RankPlaces.of(again).without(0).command
    assert last == ["deepspeed", "--include", "worker-1:0", *command[1:], *SCRIPT], (
        "a machine without ranks is left out"
    )
    excluded = reduced([*command, "--exclude", "worker-1:0"])
    assert excluded == ["deepspeed", "--include", "worker-0:0,1", *command[1:], *SCRIPT]
    one_each = reduced([*command, "--num_gpus", "1"], 0)
    assert one_each == ["deepspeed", "--include", "worker-1:0", *command[1:], *SCRIPT]


@pytest.mark.parametrize("command", [["python"], ["deepspeed", "--num_gpus", "all"], ["deepspeed", "--include", "a"]])
def test_a_command_that_does_not_say(command: list[str]) -> None:
    with pytest.raises(UserError, match="--include"):
        RankPlaces.of([*command, *SCRIPT])

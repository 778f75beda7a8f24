"""Commands with one rank less: by number, by list, by hostfile."""

from pathlib import Path

import pytest

from common.errors import UserError
from common.rank_places import RankPlaces

SCRIPT = ["deepspeed_train.py", "--num_gpus", "9"]  # the script's own words are not the launcher's


def reduced(command: list[str], rank: int | None = None) -> list[str]:
    return RankPlaces.of([*command, *SCRIPT]).without(rank).command


@pytest.mark.parametrize("given", [["--num_gpus", "4"], ["--num_gpus=4"], ["--num_accelerators=4"]])
def test_a_number(given: list[str]) -> None:
    once = reduced(["deepspeed", *given, "--master_port", "1"])
    assert once == ["deepspeed", "--master_port", "1", "--num_gpus", "3", *SCRIPT]
    assert RankPlaces.of(once).without(None).command == [*once[:4], "2", *SCRIPT]


@pytest.mark.parametrize("given", [["--num_gpus", "1"], ["--num_gpus=1"]])
def test_the_last_rank_stays(given: list[str]) -> None:
    assert reduced(["deepspeed", *given]) == ["deepspeed", *given, *SCRIPT]


def test_words_before_the_launcher() -> None:
    before = ["nice", "-n", "19", "deepspeed"]
    assert reduced([*before, "--num_gpus=4"]) == [*before, "--num_gpus", "3", *SCRIPT]
    assert reduced([*before, "--include=localhost:0,1"]) == [*before, "--include", "localhost:0", *SCRIPT]


@pytest.mark.parametrize(("rank", "left"), [(None, "localhost:0,2"), (0, "localhost:2,5"), (1, "localhost:0,5")])
def test_a_list_of_devices(rank: int | None, left: str) -> None:
    assert reduced(["deepspeed", "--include", "localhost:0,2,5"], rank) == ["deepspeed", "--include", left, *SCRIPT]
    assert reduced(["deepspeed", "--include=localhost:0,2,5"], rank) == ["deepspeed", "--include", left, *SCRIPT]


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_hostfile(is_joined: bool, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two machines\nworker-0 slots=2\nworker-1 slots=2\n")
    command = ["deepspeed", f"--hostfile={hosts}"] if is_joined else ["deepspeed", "--hostfile", str(hosts)]
    expected = [*command, "--include", "worker-0:0@worker-1:0,1", *SCRIPT]
    assert reduced(command, 1) == expected
    again = RankPlaces.of(expected).without(None).command
    assert again == [*command, "--include", "worker-0:0@worker-1:0", *SCRIPT]
    last = RankPlaces.of(again).without(0).command
    assert last == [*command, "--include", "worker-1:0", *SCRIPT], "a machine without ranks is left out"
    excluded = reduced([*command, "--exclude", "worker-1:0"])
    assert excluded == [*command, "--include", "worker-0:0,1", *SCRIPT]
    one_each = reduced([*command, "--num_gpus", "1"], 0)
    assert one_each == [*command, "--include", "worker-1:0", *SCRIPT]


@pytest.mark.parametrize("command", [["python"], ["deepspeed", "--num_gpus", "all"], ["deepspeed", "--include", "a"]])
def test_a_command_that_does_not_say(command: list[str]) -> None:
    with pytest.raises(UserError, match="--include"):
        RankPlaces.of([*command, *SCRIPT])

"""A process's place: from a launcher's variables, from srun's, or alone."""

from training.environment import Place, find_place


def test_alone_fills_in_a_world_of_one() -> None:
    environment: dict[str, str] = {}
    assert find_place(environment) == Place(rank=0, local_rank=0, world_size=1, local_size=1)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(environment["MASTER_PORT"]) < 65536


def test_two_processes_alone_take_different_ports() -> None:
    first, second = {}, {}
    find_place(first)
    find_place(second)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]


def test_launchers_variables_are_kept() -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "MASTER_PORT": "1"}
    environment["MASTER_ADDR"] = "node-a"
    assert find_place(environment) == Place(rank=5, local_rank=1, world_size=8, local_size=4)
    assert environment["MASTER_PORT"] == "1"


def test_sruns_variables() -> None:
    environment = {
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "MASTER_ADDR": "node-a",
    }
    assert find_place(environment) == Place(rank=9, local_rank=1, world_size=16, local_size=8)
    assert environment["RANK"] == "9"

"""The process's place among its peers: ranks, port, threads, device."""

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """One rank of the world."""

    rank: int
    local_rank: int
    world_size: int
    local_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


# What srun calls the variables that torch's launchers set.
SLURM_NAMES = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_SIZE": "SLURM_NTASKS_PER_NODE",
}


def find_place(environment: MutableMapping[str, str] = os.environ) -> Place:
    """Read the launcher's variables, or srun's; without either, fill in a world of one on a free port."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        if "MASTER_ADDR" in environment and all(name in environment for name in SLURM_NAMES.values()):
            environment.update({name: environment[slurm] for name, slurm in SLURM_NAMES.items()})
        else:
            environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    world_size = int(environment["WORLD_SIZE"])
    return Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_size=int(environment.get("LOCAL_SIZE", environment.get("LOCAL_WORLD_SIZE", str(world_size)))),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def share_cores(place: Place, environment: MutableMapping[str, str] = os.environ) -> int:
    """Give each rank of this machine its share of the cores, unless OMP_NUM_THREADS or a binding already says so."""
    if "OMP_NUM_THREADS" not in environment:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // place.local_size))
    # Denormals make a CPU matmul up to 30 times slower; worker threads inherit the setting, so it comes before them.
    torch.set_flush_denormal(True)
    return torch.get_num_threads()


def pick_device(place: Place) -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank)
    return torch.device("cpu")

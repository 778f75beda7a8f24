"""The rank of this process: launcher variables, port, threads, device."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch

from common.errors import Problems, UserError
from training.runtime.rank_variables import take_over


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process in the whole run and on its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


START_AGAIN = "Start with `deepspeed`, `torchrun` or scripts/slurm.sh, which set it, or unset RANK and WORLD_SIZE"


def read_rank_info(environment: MutableMapping[str, str] = os.environ) -> RankInfo:
    """Read the variables of the launcher, srun or mpirun; without any, set those of a single rank on a free port."""
    if "RANK" not in environment and not take_over(environment) and "WORLD_SIZE" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    problems = Problems()
    world_size = _read_number(environment, "WORLD_SIZE", None, 1, problems)
    rank_info = RankInfo(
        rank=_read_number(environment, "RANK", None, 0, problems),
        local_rank=_read_number(environment, "LOCAL_RANK", "0" if world_size == 1 else None, 0, problems),
        world_size=world_size,
        local_size=_read_number(
            environment, "LOCAL_SIZE", environment.get("LOCAL_WORLD_SIZE", str(world_size)), 1, problems
        ),
    )
    problems.raise_if_any()
    _check_rank_info(rank_info, problems)
    _check_meeting_point(rank_info, environment, problems)
    _check_restarts(environment, problems)
    problems.raise_if_any()
    return rank_info


def _read_number(
    environment: MutableMapping[str, str], name: str, default: str | None, least: int, problems: Problems
) -> int:
    text = environment.get(name, default)
    if text is not None and re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= least:
        return int(text)
    found = "it is not set" if text is None else f"found {text!r}"
    problems.add(f"environment variable {name}: {found}, expected a whole number from {least} up. {START_AGAIN}")
    return least


def _check_rank_info(rank_info: RankInfo, problems: Problems) -> None:
    pairs = (
        ("RANK", rank_info.rank, "WORLD_SIZE", rank_info.world_size),
        ("LOCAL_RANK", rank_info.local_rank, "LOCAL_SIZE", rank_info.local_size),
    )
    for name, number, total_name, total in pairs:
        if number >= total:
            problems.add(
                f"environment variable {name}: found {number}, but {total_name} is {total}; expected 0 to {total - 1}. "
                f"{START_AGAIN}"
            )
    if rank_info.local_size > rank_info.world_size:
        problems.add(
            f"environment variable LOCAL_SIZE: found {rank_info.local_size} ranks on this machine, but WORLD_SIZE is "
            f"{rank_info.world_size}. {START_AGAIN}"
        )


def _check_meeting_point(rank_info: RankInfo, environment: MutableMapping[str, str], problems: Problems) -> None:
    """Check MASTER_ADDR and MASTER_PORT; a single rank gets defaults."""
    environment.setdefault("LOCAL_RANK", "0")
    if rank_info.world_size == 1:
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(free_port()))
    if "MASTER_ADDR" not in environment:
        problems.add(
            f"environment variable MASTER_ADDR: it is not set, but WORLD_SIZE is {rank_info.world_size}; expected the "
            f"machine of rank 0. {START_AGAIN}"
        )
    port = environment.setdefault("MASTER_PORT", "29500")  # torch's own default
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        problems.add(
            f"environment variable MASTER_PORT: found {port!r}, expected a port from 1 to 65535. Set it to a free one, "
            f"the same on all machines"
        )


def is_agent_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the agent of torchrun serves the store at MASTER_ADDR; otherwise rank 0 does."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _check_restarts(environment: Mapping[str, str], problems: Problems) -> None:
    """Refuse restarts in which ranks would find addresses of the attempt before, in a store that outlives it.

    On one machine all ranks know the attempt's number; agents of several machines count differently.
    """
    machines = environment.get("GROUP_WORLD_SIZE", "1")
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if is_agent_store(environment) and machines != "1" and restarts != "0":
        problems.add(
            f"environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE: it is not set, but torchrun runs on {machines} "
            f"machines with --max-restarts {restarts}; expected 1. Export it before torchrun on every machine; without "
            f"it, restarted ranks can wait for ranks that no longer exist"
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def share_cores(rank_info: RankInfo, environment: MutableMapping[str, str] = os.environ) -> int:
    """Divide the cores of this machine between its ranks, unless OMP_NUM_THREADS or a core binding is set.

    Returns the number of threads.
    """
    threads = environment.get("OMP_NUM_THREADS")
    if threads is not None and not re.fullmatch(r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", threads):
        raise UserError(
            f"environment variable OMP_NUM_THREADS: found {threads!r}, expected a whole number of at least 1. Unset it "
            f"to divide the cores between the ranks"
        )
    if threads is None:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // rank_info.local_size))
    # Denormals make a CPU matmul up to 30 times slower; worker threads inherit the setting, so it comes before them.
    torch.set_flush_denormal(True)
    return torch.get_num_threads()


def pick_device(rank_info: RankInfo) -> torch.device:
    if torch.cuda.is_available():
        if rank_info.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"environment variable LOCAL_RANK: found {rank_info.local_rank}, but this machine has "
                f"{torch.cuda.device_count()} GPUs. Start at most one rank per GPU (--num_gpus), or check "
                f"CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(rank_info.local_rank)
        return torch.device("cuda", rank_info.local_rank)
    return torch.device("cpu")

"""The rank of this process: launcher variables, port, threads, device."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from common.errors import Problems, UserError
from common.words import counted
from training.runtime.launchers import KNOWN_LAUNCHERS, SIGNS, SRUN, LauncherVariables


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
OWN_RUN = "set RANK=0 and WORLD_SIZE=1 if every process is a run of its own"


def read_rank_info(environment: MutableMapping[str, str] = os.environ) -> RankInfo:
    """Read the variables of the launcher, srun or mpirun; without any, set those of a single rank on a free port."""
    if "RANK" not in environment and not _take_over(environment) and "WORLD_SIZE" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    problems = Problems()
    read = partial(_read_number, environment, problems)
    world_size = read("WORLD_SIZE", 1)
    rank_info = RankInfo(
        rank=read("RANK", 0),
        local_rank=read("LOCAL_RANK", 0, "0" if world_size == 1 else None),
        world_size=world_size,
        local_size=read("LOCAL_SIZE", 1, environment.get("LOCAL_WORLD_SIZE", str(world_size))),
    )
    problems.raise_if_any()
    _check_rank_info(rank_info, problems)
    _check_meeting_point(rank_info, environment, problems)
    _check_restarts(environment, problems)
    problems.raise_if_any()
    return rank_info


def _take_over(environment: MutableMapping[str, str]) -> bool:
    """Set torch's variables from those of the launcher; False if there is none and the process is alone."""
    # Whether srun started one of several tasks, or a single one with MASTER_ADDR set. A batch script has srun's
    # variables too, but not those of a step.
    is_by_srun = "MASTER_ADDR" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    launchers = [known for known in KNOWN_LAUNCHERS if known is not SRUN or is_by_srun]
    found = next((known for known in launchers if not known.list_missing(environment)), None)
    if found is None:
        _refuse_unplaced(launchers, environment)
        return False
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = {name: environment[variable] for name, variable in zip(names, found[1:], strict=True)}
    contradicting = [
        f"{name} is {environment[name]}" for name in numbers if environment.get(name, numbers[name]) != numbers[name]
    ]
    if contradicting:
        raise UserError(
            f"environment variables: {found.launcher} started this process as rank {numbers['RANK']} of "
            f"{numbers['WORLD_SIZE']}, but {', '.join(contradicting)}. Unset what was exported by hand"
        )
    if numbers["WORLD_SIZE"] != "1" and "MASTER_ADDR" not in environment:
        if found is SRUN or numbers["LOCAL_SIZE"] != numbers["WORLD_SIZE"]:
            raise UserError(_missing_address(found))
        environment["MASTER_ADDR"] = "127.0.0.1"
    environment.update(numbers)
    return True


def _missing_address(found: LauncherVariables) -> str:
    start = f"{found.launcher} started this process, but MASTER_ADDR is not set; ranks need it to find each other"
    if found is SRUN:
        return f"{start}. Start it with scripts/slurm.sh, or export MASTER_ADDR (the first node's name) and MASTER_PORT"
    return (
        f"{start}. Export the name of rank 0's machine, for example with "
        f'`deepspeed --launcher openmpi --launcher_args "-x MASTER_ADDR=worker-0"`'
    )


def _refuse_unplaced(launchers: Sequence[LauncherVariables], environment: Mapping[str, str]) -> None:
    """UserError if a launcher has started this process among others, and not said as which."""
    for known in launchers:
        if known.rank not in environment or environment.get(known.world_size) == "1":
            continue
        by_srun = "Start it with scripts/slurm.sh, or pass srun --ntasks-per-node"
        raise UserError(
            f"environment variables: {known.launcher} started this process ({known.rank} is "
            f"{environment[known.rank]}), but these are not set: {', '.join(known.list_missing(environment))}; "
            f"expected them, because every process would train alone and overwrite the others' files otherwise. "
            f"{by_srun if known is SRUN else 'Start with `deepspeed`, `torchrun` or srun'}, or {OWN_RUN}"
        )
    signs = [f"{name} is {environment[name]}" for name in SIGNS if environment.get(name, "0") != "0"]
    if signs and not any(environment.get(known.world_size) == "1" for known in KNOWN_LAUNCHERS):
        raise UserError(
            f"environment variables: {', '.join(signs)}, so a launcher started this process among others, but RANK and "
            f"WORLD_SIZE are not set; expected both. Start with `deepspeed`, `torchrun` or srun, or {OWN_RUN}"
        )


def _read_number(
    environment: Mapping[str, str], problems: Problems, name: str, least: int, default: str | None = None
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
    """Divide the cores of this machine between its ranks, unless OMP_NUM_THREADS is set; the threads of this one."""
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
                f"{counted(torch.cuda.device_count(), 'GPU')}. Start at most one rank per GPU (--num_gpus), or check "
                f"CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(rank_info.local_rank)
        return torch.device("cuda", rank_info.local_rank)
    return torch.device("cpu")

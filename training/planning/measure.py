"""This machine as an accelerator: its products, memory and links, measured when the command runs."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from common.errors import UserError
from common.words import counted
from nvidia.config import BertConfig
from nvidia.cpu.amx import avoid_broken_amx
from nvidia.cpu.dropout import dropout_add
from training.metrics.flops import MatmulProbe
from training.planning.accelerators import GIB, MEASURED_HERE, Accelerator
from training.runtime.precision import DTYPES, find_abilities
from training.runtime.ranks import free_port

TOKENS = 2048  # rows of the measured products
REDUCED = 1 << 25  # bytes of the measured all-reduce
ROUNDS = 5


def measure_here(config: BertConfig, ranks: int, clock: Callable[[], float] = time.perf_counter) -> Accelerator:
    """What each of `ranks` processes gets on this machine; takes a few seconds."""
    avoid_broken_amx()
    is_cuda = torch.cuda.is_available()
    if is_cuda and ranks > torch.cuda.device_count():
        raise UserError(f"--gpus {ranks}:{MEASURED_HERE}: this machine has {counted(torch.cuda.device_count(), 'GPU')}")
    device = torch.device("cuda" if is_cuda else "cpu")
    threads = torch.get_num_threads()
    if not is_cuda and "OMP_NUM_THREADS" not in os.environ:  # as ranks share the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        abilities = find_abilities()
        peaks = {
            name: MatmulProbe(config, TOKENS, dtype, device, clock).measure_speed()
            for name, dtype in DTYPES.items()
            if abilities.can(name)
        }
        streamed = measure_memory(device, config.hidden_size, clock)
    finally:
        torch.set_num_threads(threads)
    link = measure_link(ranks, clock) if ranks > 1 else streamed
    return Accelerator(
        name=MEASURED_HERE,
        memory_gib=_memory_gib(is_cuda) / (1 if is_cuda else ranks),
        memory_bytes_per_s=streamed,
        peak_flops=peaks,
        efficiency=1.0,
        efficiency_origin="measured now",
        intra_node_bytes_per_s=link,
        inter_node_bytes_per_s=link,
        compute_capability=torch.cuda.get_device_capability() if is_cuda else None,
        device=device.type,
        is_measured=True,
    )


def measure_memory(device: torch.device, width: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that the model's kernels between products read and write: norm, activation, dropout and sum."""
    x = torch.randn(TOKENS, width, device=device)

    def run() -> None:
        normed = functional.layer_norm(x, (width,))
        dropout_add(functional.gelu(normed), x, 0.1, training=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return (2 + 2 + 3) * x.nbytes / _best_seconds(run, clock)


def measure_link(ranks: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second of a link of the ring, from an all-reduce between processes of this machine."""
    queue = processes.get_context("spawn").SimpleQueue()
    spawn(_reduce, args=(ranks, free_port(), queue, clock), nprocs=ranks)
    seconds = float(queue.get())
    return 2 * (ranks - 1) / ranks * REDUCED / seconds


def _reduce(
    rank: int, ranks: int, port: int, queue: "processes.SimpleQueue[float]", clock: Callable[[], float]
) -> None:
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if is_cuda else "gloo", init_method=address, rank=rank, world_size=ranks)
    values = torch.ones(REDUCED // 4, device="cuda" if is_cuda else "cpu")

    def reduce() -> None:
        dist.all_reduce(values)
        if is_cuda:
            torch.cuda.synchronize()

    seconds = _best_seconds(reduce, clock)
    if rank == 0:
        queue.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _best_seconds(action: Callable[[], None], clock: Callable[[], float]) -> float:
    """The shortest of several calls, without the first, which pays for allocations."""
    action()
    seconds = []
    for _ in range(ROUNDS):
        began = clock()
        action()
        seconds.append(clock() - began)
    return min(seconds)


def _memory_gib(is_cuda: bool) -> float:
    if is_cuda:
        return torch.cuda.get_device_properties(0).total_memory / GIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB

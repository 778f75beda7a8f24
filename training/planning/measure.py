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
from nvidia.cpu.dropout import dropout_add
from nvidia.cpu.libraries import forced_libraries, in_use, use
from nvidia.fastest import measure_libraries
from training.metrics.flops import measure_speeds
from training.planning.accelerators import GIB, MEASURED_HERE, Accelerator
from training.runtime.ranks import free_port

TOKENS = 2048  # rows of the measured kernels
ROW = 128  # tokens of a typical row
REDUCED = 1 << 25  # bytes of the measured all-reduce
ROUNDS = 5
Clock = Callable[[], float]


def measure_here(config: BertConfig, ranks: int, clock: Clock = time.perf_counter) -> Accelerator:
    """What each of `ranks` processes gets on this machine; takes a few seconds."""
    is_cuda = torch.cuda.is_available()
    if is_cuda and ranks > torch.cuda.device_count():
        raise UserError(f"--gpus {ranks}:{MEASURED_HERE}: this machine has {counted(torch.cuda.device_count(), 'GPU')}")
    threads = torch.get_num_threads()
    if not is_cuda and "OMP_NUM_THREADS" not in os.environ:  # as ranks share the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    before = in_use()
    try:
        if not is_cuda:  # as a run does
            use(forced_libraries() or measure_libraries(config, TOKENS // ROW, ROW).libraries)
        speeds = measure_speeds(config, clock)
        streamed = measure_memory(config.hidden_size, clock)
    finally:
        torch.set_num_threads(threads)
        use(before)
    link = measure_link(ranks, clock) if ranks > 1 else streamed
    if is_cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    return Accelerator(
        name=MEASURED_HERE,
        memory_gib=memory / GIB,
        memory_tb_per_s=streamed / 1e12,
        peak_tflops={name: speed / 1e12 for name, speed in speeds.items()},  # type: ignore[misc]
        efficiency=1.0,  # what is measured is achieved
        efficiency_origin="measured now",
        intra_node_gb_per_s=link / 1e9,
        inter_node_gb_per_s=link / 1e9,
        compute_capability=torch.cuda.get_device_capability() if is_cuda else None,
        device="cuda" if is_cuda else "cpu",
        memory_efficiency=1.0,
        link_efficiency=1.0,
    )


def measure_memory(width: int, clock: Clock) -> float:
    """Bytes per second that the model's kernels between products read and write: norm, activation, dropout and sum."""
    x = torch.randn(TOKENS, width, device="cuda" if torch.cuda.is_available() else "cpu")

    def run() -> None:
        normed = functional.layer_norm(x, (width,))
        dropout_add(functional.gelu(normed), x, 0.1, training=True)

    return (2 + 2 + 3) * x.nbytes / _best_seconds(run, clock)


def measure_link(ranks: int, clock: Clock) -> float:
    """Bytes per second of a link of the ring, from an all-reduce between processes of this machine."""
    queue = processes.get_context("spawn").SimpleQueue()
    spawn(_reduce, args=(ranks, free_port(), queue, clock), nprocs=ranks)
    return 2 * (ranks - 1) / ranks * REDUCED / float(queue.get())


def _reduce(rank: int, ranks: int, port: int, queue: "processes.SimpleQueue[float]", clock: Clock) -> None:
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if is_cuda else "gloo", init_method=address, rank=rank, world_size=ranks)
    values = torch.ones(REDUCED // 4, device="cuda" if is_cuda else "cpu")
    seconds = _best_seconds(lambda: dist.all_reduce(values), clock)
    if rank == 0:
        queue.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _best_seconds(action: Callable[[], object], clock: Clock) -> float:
    """The shortest of several calls, without the first, which pays for allocations."""
    seconds = []
    for _ in range(1 + ROUNDS):
        began = clock()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return min(seconds[1:])

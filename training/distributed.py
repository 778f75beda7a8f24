"""The few collectives a run needs, through DeepSpeed's communication layer."""

from collections.abc import Callable

import deepspeed
import deepspeed.comm as dist
import torch


def start(device: torch.device) -> None:
    """Join the world that the environment's variables describe."""
    # Compiling this operation takes a minute and needs a compiler; only DeepSpeed's inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, in place and returned."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def on_main_rank_first(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 alone; a failure there fails every rank instead of leaving them waiting."""
    failure = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # re-raised below, after the others have been told
            failure = error
    if dist.get_world_size() > 1:
        verdict = torch.tensor([0 if failure is None else 1], device="cuda" if torch.cuda.is_available() else "cpu")
        dist.broadcast(verdict, src=0)
        if failure is None and int(verdict) == 1:
            raise RuntimeError("rank 0 failed; its message says why")
    if failure is not None:
        raise failure


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

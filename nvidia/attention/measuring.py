"""The attention backends that `auto` may mean on a CPU, timed on one layer of the model."""

import math
import time

import torch

from nvidia.attention import grouped, sdpa
from nvidia.attention.backend import AttentionInputs
from nvidia.cpu.measuring import Clock, Work, time_in_turns
from nvidia.unpadding import plan_packing

BACKENDS = {"grouped": grouped.BACKEND, "sdpa": sdpa.BACKEND}
MIN_SCORES = 1 << 21  # of a layer; below that the backend is a matter of a few milliseconds
MAX_SCORES = 1 << 19  # of a timed pass, for each thread: about 10 ms of a core, forward and backward


def time_attention(
    rows: int, length: int, heads: int, head_size: int, dropout_prob: float, clock: Clock = time.thread_time
) -> dict[str, float]:
    """The time of a forward and a backward pass by each backend, for a batch whose rows are on average 7/8 full.

    Empty if the batch is so small that it does not matter. Long rows are represented by fewer heads, and the longest by
    shorter rows: backends compute both in parts that fit the cache. torch's random state is kept.
    """
    if rows * heads * length * length < MIN_SCORES:
        return {}
    most = MAX_SCORES * torch.get_num_threads()
    length = min(length, math.isqrt(MAX_SCORES))
    heads = min(heads, most // length**2)
    rows = min(rows, most // (heads * length**2))
    lengths = torch.linspace(0.75 * length, length, rows).long() if rows > 1 else torch.tensor([length])
    packing = plan_packing(torch.arange(length) < lengths[:, None])
    inputs = AttentionInputs(packing, dropout_prob)
    qkv = torch.linspace(-1, 1, packing.num_tokens * 3 * heads * head_size).view(-1, 3, heads, head_size)
    qkv.requires_grad_()

    def run(backend: str) -> Work:
        def work(number: int) -> None:
            context, _ = BACKENDS[backend].attend(qkv, inputs)
            # A sum, because torch imports its compiler for the gradient of a tensor that is given to backward().
            (context * context.detach()).sum().backward()

        return work

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for backend in BACKENDS.values():  # loads, or compiles, what it needs
            backend.attend(qkv[:1], AttentionInputs(plan_packing(torch.ones(1, 1, dtype=torch.bool)), dropout_prob))
        return time_in_turns({backend: run(backend) for backend in BACKENDS}, clock)

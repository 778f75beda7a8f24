"""Time of collectives: rings within a node, rings of equal ranks between nodes, and what of it computation hides.

S bytes, n nodes of g devices.
"""

from dataclasses import dataclass
from math import ceil, log2

from training.planning.accelerators import INTER_NODE_LATENCY, INTRA_NODE_LATENCY, Cluster
from training.planning.memory import ZeroSettings
from training.planning.workload import BYTES, ParameterCount

BACKWARD_SHARE = 2 / 3  # of a micro-step: what a reduction can hide behind
# Share of that time in which a reduction really proceeds: it competes with the products for cores and memory.
OVERLAP = 0.8
PREFETCHED = 50_000_000  # elements that ZeRO-3 gathers at a time by default
# Passes over the gradients beside a reduction: DeepSpeed flattens, scales and copies back, reading and writing each.
GRADIENT_PASSES = 6
SMALL_COLLECTIVES = 6  # per step: masked tokens, norm, overflow, loss and counters


@dataclass(frozen=True)
class Communication:
    """Seconds per optimizer step, and bytes that one rank sends."""

    seconds: float
    exposed_seconds: float  # that computation does not hide
    bytes_sent: float


def reduce_scatter_seconds(size: float, cluster: Cluster) -> float:
    """(g-1)/g · S over the node's links, then (n-1)/n · S/g over each device's own network link.

    An all-gather is the same in the other direction, and an all-reduce is both: between nodes only S/g of each device
    travels.
    """
    accelerator, inside, nodes = cluster.accelerator, cluster.gpus_per_node, cluster.nodes
    within = (inside - 1) / inside * size / accelerator.intra_node_bytes_per_s
    between = (nodes - 1) / nodes * size / inside / accelerator.inter_node_bytes_per_s
    return within + between + _latency(cluster)


def _latency(cluster: Cluster) -> float:
    """Hops of a ring within the node, of a tree between nodes."""
    between = ceil(log2(cluster.nodes)) if cluster.nodes > 1 else 0
    return (cluster.gpus_per_node - 1) * INTRA_NODE_LATENCY + between * INTER_NODE_LATENCY


def estimate_communication(
    parameters: ParameterCount,
    precision: str,
    zero: ZeroSettings,
    cluster: Cluster,
    micro_steps: int,
    micro_step_seconds: float,
) -> Communication:
    """Estimate an optimizer step of `micro_steps`, as DeepSpeed 0.19 communicates at each ZeRO stage."""
    if cluster.world_size == 1:
        return Communication(0.0, 0.0, 0.0)
    size = float(BYTES[precision] * parameters.total)
    # Stage 0 and 1 reduce once per step, 2 and 3 after each micro-step.
    reductions = micro_steps if zero.stage >= 2 else 1
    # Up to stage 2 gradients are all-reduced by default even where a rank needs its own part only.
    ways = 1 if zero.stage == 3 or (zero.stage > 0 and zero.reduces_to_owners) else 2
    buckets = ceil(parameters.total / zero.reduce_bucket_size)
    one_way = reduce_scatter_seconds(size, cluster)
    reduce_once = ways * one_way + (buckets - 1) * _latency(cluster)
    copies = GRADIENT_PASSES * size / cluster.accelerator.streaming_bytes_per_s if zero.stage < 3 else 0.0
    reduce = reductions * (reduce_once + copies)
    gathers = _gathers(parameters, zero, micro_steps)
    messages = ceil(parameters.total / (PREFETCHED if zero.stage == 3 else zero.allgather_bucket_size))
    gather = gathers * (one_way + (messages - 1) * _latency(cluster))
    small = SMALL_COLLECTIVES * 2 * _latency(cluster)
    if zero.stage == 3:
        hidden = OVERLAP * micro_step_seconds * micro_steps if zero.overlaps else 0.0
        exposed = max(0.0, reduce + gather - hidden)
    else:
        hidden = OVERLAP * BACKWARD_SHARE * micro_step_seconds * reductions if zero.overlaps else 0.0
        exposed = max(0.0, reduce - hidden) + gather
    others = (cluster.world_size - 1) / cluster.world_size
    sent = size * others * (reductions * ways + gathers)
    return Communication(reduce + (gather + small), exposed + small, sent)


def _gathers(parameters: ParameterCount, zero: ZeroSettings, micro_steps: int) -> int:
    """All-gathers of the weights in a step: after the update, or at stage 3 before each pass that needs them."""
    if zero.stage == 0:
        return 0
    if zero.stage < 3:
        return 1
    stays = parameters.total <= min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
    return micro_steps * (1 if stays else 2)

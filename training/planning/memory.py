"""Memory of one rank by part, for each ZeRO stage, as DeepSpeed 0.19 allocates it.

P parameters, N ranks, e bytes of a parameter in the model's precision.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nvidia.config import BertConfig
from training.planning.activations import estimate_activations
from training.planning.workload import BYTES, Batch, Execution, ParameterCount

MASTER = 4  # bytes of a master weight, and of an element of optimizer state
ALL_REDUCE_ELEMENTS = 500_000_000  # gradients that DeepSpeed flattens at a time at stage 0
# Tensors of optimizer state per parameter. Muon keeps one for the encoder's matrices and two for the others.
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "lamb": 2, "muon": 2, "lion": 1, "adagrad": 1, "muadam": 2, "muadamw": 2}


@dataclass(frozen=True)
class ZeroSettings:
    """The settings of the DeepSpeed JSON that decide memory and communication."""

    stage: int
    optimizer: str = "adamw"
    is_amsgrad: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    overlaps: bool = False
    reduce_bucket: int = 500_000_000  # elements
    all_gather_bucket: int = 500_000_000
    is_contiguous: bool = True
    reduces_to_owners: bool = False  # use_multi_rank_bucket_allreduce false: half of an all-reduce's traffic
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000
    accumulates_in_fp32: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any], stage: int | None = None) -> "ZeroSettings":
        """The settings of a checked DeepSpeed JSON, for its own or for another stage."""
        zero, optimizer = content.get("zero_optimization", {}), content.get("optimizer", {})
        stage = int(zero.get("stage", 0)) if stage is None else stage
        overlaps = zero.get("overlap_comm")
        return cls(
            stage=stage,
            optimizer=str(optimizer.get("type", "AdamW")).lower(),
            is_amsgrad=bool(optimizer.get("params", {}).get("amsgrad", False)),
            offloads_optimizer=_is_offloaded(zero, "offload_optimizer") and stage > 0,
            offloads_parameters=_is_offloaded(zero, "offload_param") and stage == 3,
            overlaps=stage == 3 if overlaps is None else bool(overlaps) and stage > 0,
            reduce_bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
            all_gather_bucket=int(zero.get("allgather_bucket_size", 500_000_000)),
            is_contiguous=bool(zero.get("contiguous_gradients", True)),
            reduces_to_owners=zero.get("use_multi_rank_bucket_allreduce") is False and zero.get("reduce_scatter", True),
            max_live_parameters=int(zero.get("stage3_max_live_parameters", 1_000_000_000)),
            max_reuse_distance=int(zero.get("stage3_max_reuse_distance", 1_000_000_000)),
            persistence_threshold=int(zero.get("stage3_param_persistence_threshold", 100_000)),
            accumulates_in_fp32=str(content.get("data_types", {}).get("grad_accum_dtype", "")).endswith("32"),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `host` is what offloading puts into the machine's memory instead."""

    weights: float
    master_weights: float
    gradients: float
    optimizer: float
    buffers: float  # of reductions, and what the optimizer step needs for a moment
    activations: float
    workspace: float  # temporaries of the loss and of the backward pass
    host: float = 0.0

    @property
    def states(self) -> float:
        return self.weights + self.master_weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """The most bytes on the device. Buffers of the step and activations are counted together: an upper limit."""
        return self.states + self.buffers + self.activations + self.workspace

    def parts(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "host"}


def estimate_memory(
    config: BertConfig,
    batch: Batch,
    execution: Execution,
    zero: ZeroSettings,
    world_size: int,
    parameters: ParameterCount,
) -> Memory:
    """The peak of a rank by part. Gradients count whole, though with one micro-step they appear as activations go."""
    activations = estimate_activations(config, batch, execution)
    states = estimate_states(parameters, execution.precision, zero, world_size)
    return Memory(**states, activations=activations.stored, workspace=activations.workspace)


def estimate_states(
    parameters: ParameterCount, precision: str, zero: ZeroSettings, world_size: int
) -> dict[str, float]:
    """All that does not depend on the batch."""
    total, size, stage = parameters.total, BYTES[precision], zero.stage
    is_half = size < MASTER
    share = total / world_size if stage > 0 else total
    optimizer = MASTER * _optimizer_elements(parameters, zero) / (world_size if stage > 0 else 1)
    master = MASTER * share if is_half or stage > 0 else 0.0
    weights = size * total if stage < 3 else size * (share + parameters.small)
    gradient_size = MASTER if zero.accumulates_in_fp32 and stage > 1 else size
    gradients = size * total if stage < 2 else gradient_size * share
    buffers = _buffers(parameters, size, zero, share)
    host = 0.0
    if zero.offloads_optimizer:
        host = master + optimizer + MASTER * share + size * share
        master, optimizer, buffers = 0.0, 0.0, _bucket(parameters, size, zero)
    if zero.offloads_parameters:
        host += size * share
        weights -= size * share
    return {
        "weights": float(weights),
        "master_weights": float(master),
        "gradients": float(gradients),
        "optimizer": float(optimizer),
        "buffers": float(buffers),
        "host": float(host),
    }


def _buffers(parameters: ParameterCount, size: int, zero: ZeroSettings, share: float) -> float:
    """The larger of the two moments: gradients are reduced during the backward pass, the step comes after it."""
    is_half = size < MASTER
    if zero.stage == 0:
        flattened = size * min(parameters.total, ALL_REDUCE_ELEMENTS)
        return max(flattened, MASTER * parameters.total if is_half else 0)
    step = (MASTER + size if is_half else size) * share  # the partition's gradient, flat and in fp32
    gathered = 0.0
    if zero.stage == 3:
        step = (MASTER if is_half else 0) * share
        gathered = size * min(parameters.total - parameters.small, zero.max_live_parameters)
    return max(_bucket(parameters, size, zero) + gathered, step)


def _bucket(parameters: ParameterCount, size: int, zero: ZeroSettings) -> float:
    """DeepSpeed allocates whole buckets, however small the model is, and two where reductions overlap."""
    if not zero.is_contiguous:
        return size * min(parameters.total, zero.reduce_bucket)
    twice = 2 if zero.overlaps and zero.stage < 3 else 1
    return float(size * zero.reduce_bucket * twice)


def _optimizer_elements(parameters: ParameterCount, zero: ZeroSettings) -> int:
    states = OPTIMIZER_STATES.get(zero.optimizer, 2) + (1 if zero.is_amsgrad else 0)
    saved_by_muon = parameters.encoder_matrices if zero.optimizer == "muon" else 0
    return states * parameters.total - saved_by_muon


def _is_offloaded(zero: Mapping[str, Any], key: str) -> bool:
    block = zero.get(key)
    return isinstance(block, Mapping) and block.get("device", "none") != "none"

"""One configuration on one cluster: memory, time of a step, and throughput."""

from dataclasses import dataclass, replace
from typing import Any

from training.planning.accelerators import GIB, Cluster
from training.planning.communication import Communication, estimate_communication
from training.planning.compute import MicroStep, estimate_micro_step, optimizer_seconds
from training.planning.memory import Memory, ZeroSettings, estimate_activations, estimate_states
from training.planning.workload import Batch, Execution, PlannedModel

RECOMPUTATION_FLAGS = {
    "activation": "--gelu_checkpoint",
    "attention": "--attention_dropout_checkpoint",
    "norm": "--normalize_invertible",
}


@dataclass(frozen=True)
class Configuration:
    """What a user chooses: the batch's division, the ZeRO stage and what is recomputed."""

    micro: int  # rows per micro-step and rank
    accumulation: int
    zero: ZeroSettings
    execution: Execution

    @property
    def recomputation(self) -> str:
        """The launcher's flags for what is recomputed, or "none"."""
        choice = self.execution.checkpointing
        flags = [f"--gradient_checkpointing {choice.layers}"] if choice.layers else []
        flags += [flag for name, flag in RECOMPUTATION_FLAGS.items() if getattr(choice, name)]
        return " ".join(flags) or "none"


@dataclass(frozen=True)
class Estimate:
    configuration: Configuration
    world_size: int
    memory: Memory
    usable_gib: float
    micro_step: MicroStep
    communication: Communication
    optimizer_seconds: float
    tokens_per_step: float
    model_flops_per_step: float
    peak_flops: float  # of all devices, as published

    @property
    def rows_per_step(self) -> int:
        return self.configuration.micro * self.configuration.accumulation * self.world_size

    @property
    def compute_seconds(self) -> float:
        return self.configuration.accumulation * self.micro_step.seconds

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.communication.exposed_seconds + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def rows_per_second(self) -> float:
        return self.rows_per_step / self.step_seconds

    @property
    def utilization(self) -> float:
        """Model FLOPs per second over the published peak (MFU)."""
        return self.model_flops_per_step / self.step_seconds / self.peak_flops

    @property
    def fits(self) -> bool:
        return self.memory.peak / GIB <= self.usable_gib

    def as_dict(self) -> dict[str, Any]:
        configuration, zero = self.configuration, self.configuration.zero
        return {
            "micro_batch": configuration.micro,
            "accumulation": configuration.accumulation,
            "zero_stage": zero.stage,
            "overlap_comm": zero.overlaps,
            "recomputation": configuration.recomputation,
            "attention_backend": configuration.execution.backend,
            "fits": self.fits,
            "memory_gib": {name: size / GIB for name, size in self.memory.parts().items()},
            "peak_memory_gib": self.memory.peak / GIB,
            "host_memory_gib": self.memory.host / GIB,
            "usable_memory_gib": self.usable_gib,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication.seconds,
            "exposed_communication_seconds": self.communication.exposed_seconds,
            "bytes_sent_per_rank": self.communication.bytes_sent,
            "optimizer_seconds": self.optimizer_seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "rows_per_second": self.rows_per_second,
            "model_flops_utilization": self.utilization,
        }


def estimate(model: PlannedModel, cluster: Cluster, configuration: Configuration) -> Estimate:
    config, lengths = model.config, model.lengths
    accelerator, execution, zero = cluster.accelerator, configuration.execution, configuration.zero
    batch, world_size = Batch(configuration.micro, lengths), cluster.world_size
    micro_step = estimate_micro_step(config, batch, execution, accelerator, zero.stage)
    parameters = model.parameters
    updated = parameters.total / (world_size if zero.stage > 0 else 1)
    stored, workspace = estimate_activations(config, batch.heaviest(), execution)
    states = estimate_states(parameters, execution.precision, zero, world_size)
    rows = configuration.micro * configuration.accumulation * world_size
    return Estimate(
        configuration=configuration,
        world_size=world_size,
        memory=replace(states, activations=stored, workspace=workspace),
        usable_gib=accelerator.usable_gib,
        micro_step=micro_step,
        communication=estimate_communication(
            parameters, execution.precision, zero, cluster, configuration.accumulation, micro_step.seconds
        ),
        optimizer_seconds=optimizer_seconds(updated, execution.bytes, accelerator),
        tokens_per_step=rows * lengths.mean,
        model_flops_per_step=rows * model.flops_per_row,
        peak_flops=world_size * accelerator.peak_flops(execution.precision),
    )

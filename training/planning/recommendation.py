"""The fastest configuration that fits, and the DeepSpeed JSON for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from nvidia.checkpointing import Checkpointing, default_chunk
from training.planning.accelerators import GIB, Accelerator, Cluster
from training.planning.estimate import Configuration, Estimate, estimate
from training.planning.inputs import EngineInput
from training.planning.memory import ZeroSettings
from training.planning.workload import NOTHING, Execution, PlannedModel, plan_execution
from training.settings.deepspeed_file import BATCH_KEYS

STAGES = (0, 1, 2, 3)
MAX_MICRO = 4096
WORTH_IT = 0.03  # a configuration must be this much faster to be preferred to a simpler one: less is within the error
MIN_BUCKET = 5_000_000  # elements; smaller reductions are bound by latency
BUCKET_KEYS = ("reduce_bucket_size", "allgather_bucket_size")
BUCKETS = 8  # into which a model's gradients are divided, so that reductions can begin early


@dataclass(frozen=True)
class Planner:
    """What stays the same while configurations are compared."""

    model: PlannedModel
    engine: EngineInput
    precision: str

    def execution(self, accelerator: Accelerator, choice: Checkpointing = NOTHING) -> Execution:
        device, capability = accelerator.device, accelerator.compute_capability
        return plan_execution(self.model.config, self.precision, device, capability, self.model.is_pre_ln, choice)

    def estimate(self, cluster: Cluster, micro: int, zero: ZeroSettings, choice: Checkpointing = NOTHING) -> Estimate:
        accumulation = max(1, self.engine.total_rows // (micro * cluster.world_size))
        execution = self.execution(cluster.accelerator, choice)
        return estimate(self.model, cluster, Configuration(micro, accumulation, zero, execution))

    def recomputation_choices(self, accelerator: Accelerator) -> list[Checkpointing]:
        """Cheapest first."""
        execution = self.execution(accelerator)
        is_plain = execution.backend == "plain"
        choices = [NOTHING, Checkpointing(activation=True)]
        if is_plain:
            choices += [Checkpointing(attention=True), Checkpointing(activation=True, attention=True)]
        if execution.is_pre_ln:
            choices.append(Checkpointing(activation=True, norm=True, attention=is_plain))
        chunks = sorted({1, default_chunk(self.model.config.num_hidden_layers)}, reverse=True)
        return choices + [Checkpointing(layers=chunk) for chunk in chunks]

    def micro_batches(self, cluster: Cluster) -> list[int]:
        """All that divide a rank's share of the step."""
        rows = self.engine.total_rows // cluster.world_size
        return [micro for micro in range(1, min(rows, MAX_MICRO) + 1) if rows % micro == 0]

    def tuned_settings(self, stage: int, overlaps: bool) -> ZeroSettings:
        """The JSON's settings at a stage, with buckets for this model's size where the JSON does not name any."""
        zero = ZeroSettings.of(self.engine.content, stage)
        if stage == 0:
            return zero
        bucket = max(MIN_BUCKET, -(-self.model.parameters.total // BUCKETS // 2) * 2)
        given = self.engine.content.get("zero_optimization", {})
        buckets: dict[str, Any] = {key: bucket for key in BUCKET_KEYS if key not in given}
        return replace(zero, overlaps=overlaps, **buckets)


def check_precision(precision: str, accelerator: Accelerator) -> None:
    if precision not in accelerator.peak_tflops:
        known = ", ".join(key for key in accelerator.peak_tflops if key != "tf32")
        raise UserError(f"{accelerator.name} does not compute in {precision} (it can do {known}); pass --precision")


def allowed_stages(content: Mapping[str, Any]) -> tuple[int, ...]:
    """LAMB needs whole parameters; offloading needs a partition."""
    optimizer = str(content.get("optimizer", {}).get("type", "AdamW")).lower()
    if optimizer == "lamb":
        return (0,)
    stages = STAGES[:3] if optimizer == "muon" else STAGES
    configured = ZeroSettings.of(content)
    return tuple(stage for stage in stages if stage > 0 or not configured.offloads_optimizer)


def candidates(planner: Planner, cluster: Cluster, micros: Sequence[int] | None = None) -> Iterator[Estimate]:
    """Every configuration of the JSON's step that makes sense on the cluster, or those with `micros` alone."""
    micros = planner.micro_batches(cluster) if micros is None else micros
    for stage in allowed_stages(planner.engine.content):
        for overlaps in (True, False) if stage and cluster.world_size > 1 else (False,):
            zero = planner.tuned_settings(stage, overlaps)
            for choice in planner.recomputation_choices(cluster.accelerator):
                for micro in micros:
                    yield planner.estimate(cluster, micro, zero, choice)


def recommend(planner: Planner, cluster: Cluster) -> Estimate | None:
    """The fastest that fits; of those about as fast the one with the simplest settings and the least memory."""
    if planner.engine.total_rows % cluster.world_size:
        return None
    fitting = [found for found in candidates(planner, cluster) if found.fits]
    best = max((found.tokens_per_second for found in fitting), default=0.0)
    near = [found for found in fitting if found.tokens_per_second >= (1 - WORTH_IT) * best]
    return min(near, key=_complexity, default=None)


def _complexity(found: Estimate) -> tuple[int, int, float]:
    choice = found.configuration.execution.checkpointing
    recomputed = choice.activation + choice.attention + choice.norm + 4 * (choice.layers > 0)
    return recomputed, found.configuration.zero.stage, found.memory.peak


def explain_no_fit(planner: Planner, cluster: Cluster, table: Mapping[str, Accelerator]) -> str:
    """What the least would need, and where it would fit."""
    least = min(candidates(planner, cluster, [1]), key=lambda found: found.memory.peak)
    configuration, accelerator = least.configuration, cluster.accelerator
    larger = [
        other.name
        for other in table.values()
        if planner.precision in other.peak_tflops
        and other.memory_gib > accelerator.memory_gib
        and any(found.fits for found in candidates(planner, replace(cluster, accelerator=other), [1]))
    ]
    remedy = f"It would fit on {', '.join(larger)}" if larger else "It fits on no accelerator of the table"
    is_offloaded = "offload_optimizer" in planner.engine.content.get("zero_optimization", {})
    offload = "" if is_offloaded else '; or offload the optimizer ({"device": "cpu"}) in the DeepSpeed JSON'
    return (
        f"--gpus: the model does not fit on {cluster.world_size:,} × {accelerator.name}: ZeRO stage "
        f"{configuration.zero.stage} with a micro-batch of {configuration.micro} and recomputation "
        f"({configuration.recomputation}) needs {least.memory.peak / GIB:,.1f} GiB per rank, and "
        f"{accelerator.usable_gib:,.1f} are usable. {remedy}; more GPUs help where ZeRO divides the states"
        f" ({least.memory.states / GIB:,.1f} GiB){offload}"
    )


def deepspeed_json(found: Estimate, content: Mapping[str, Any]) -> dict[str, Any]:
    """The user's file with the recommended batch and ZeRO settings; everything else stays."""
    configuration, zero = found.configuration, found.configuration.zero
    made = {key: value for key, value in content.items() if key not in (*BATCH_KEYS, "zero_optimization")}
    block = {**content.get("zero_optimization", {}), "stage": zero.stage}
    if zero.stage:
        block |= {"overlap_comm": zero.overlaps, "contiguous_gradients": zero.is_contiguous}
        block |= {key: getattr(zero, key) for key in BUCKET_KEYS}
    batch = (found.rows_per_step, configuration.micro, configuration.accumulation)
    precision = configuration.execution.precision
    for name in ("fp16", "bf16", "bfloat16"):
        if isinstance(made.get(name), dict):
            made[name] = {**made[name], "enabled": name == precision}
    if precision in ("fp16", "bf16"):
        made.setdefault(precision, {"enabled": True})
    return {**dict(zip(BATCH_KEYS, batch, strict=True)), **made, "zero_optimization": block}

"""A whole plan: the configurations compared, the recommended one, the way to the end, and what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from nvidia.checkpointing import Checkpointing
from training.planning.accelerators import GIB, Accelerator, Cluster
from training.planning.estimate import Configuration, Estimate
from training.planning.inputs import DataInput, EngineInput, ModelInput
from training.planning.memory import ZeroSettings
from training.planning.recommendation import (
    Planner,
    allowed_stages,
    check_precision,
    deepspeed_json,
    explain_no_fit,
    micro_batches,
    recommend,
    recomputation_choices,
    tuned_settings,
)
from training.planning.storage import StorageLoad, estimate_storage
from training.planning.workload import ParameterCount, PlannedModel

MAX_TABLE_MICRO = 8  # columns of the table of micro-batches
HOUR = 3600.0


@dataclass(frozen=True)
class Request:
    """What the command line asks for beyond the files."""

    precision: str
    is_pre_ln: bool
    max_steps: int | None
    dollars_per_gpu_hour: float | None
    save_every_minutes: float
    keep_last: int | None
    file_system_gb_per_s: float


@dataclass(frozen=True)
class ToTheEnd:
    """Steps end at total_training_steps, at --max_steps, or where the data's epochs do."""

    steps: int
    tokens: float
    hours: float  # checkpoints included
    gpu_hours: float
    dollars: float | None


@dataclass(frozen=True)
class Fit:
    """The fastest micro-batch that fits at one stage with one choice of recomputation; None where none does."""

    zero: ZeroSettings
    choice: Checkpointing
    found: Estimate | None


@dataclass(frozen=True)
class Plan:
    model: ModelInput
    data: DataInput
    cluster: Cluster
    engine: EngineInput
    request: Request
    parameters: ParameterCount
    flops_per_token: float
    configured: Estimate | None  # the JSON's own settings; None where its micro-batch does not divide the step
    recommended: Estimate
    fits: tuple[Fit, ...]
    states: tuple[Estimate, ...]  # one for each stage, with the smallest micro-batch
    activations: tuple[tuple[Configuration, float], ...]  # bytes by micro-batch and recomputation
    scaling: tuple[tuple[int, Estimate | None], ...]  # by number of nodes
    end: ToTheEnd
    storage: StorageLoad
    notes: tuple[str, ...]

    def deepspeed_json(self) -> dict[str, Any]:
        return deepspeed_json(self.recommended, self.engine.content)


def make_plan(
    model: ModelInput,
    data: DataInput,
    engine: EngineInput,
    cluster: Cluster,
    request: Request,
    table: Mapping[str, Accelerator],
) -> Plan:
    check_precision(request.precision, cluster.accelerator)
    planned = PlannedModel(model.config, data.lengths, request.is_pre_ln)
    planner = Planner(planned, engine, request.precision)
    recommended = recommend(planner, cluster)
    if recommended is None:
        raise UserError(explain_no_fit(planner, cluster, table))
    parameters = planned.parameters()
    storage = estimate_storage(
        recommended,
        parameters,
        bytes_per_row=data.bytes_per_row,
        width=data.lengths.width,
        masked=data.lengths.mean_masked,
        interval_seconds=60 * request.save_every_minutes,
        file_system_bytes_per_s=1e9 * request.file_system_gb_per_s,
        keep_last=request.keep_last,
    )
    configured = None
    if engine.micro is not None:
        configured = planner.estimate(cluster, engine.micro, ZeroSettings.of(engine.content))
    return Plan(
        model=model,
        data=data,
        cluster=cluster,
        engine=engine,
        request=request,
        parameters=parameters,
        flops_per_token=planned.flops_per_row / data.lengths.mean,
        configured=configured,
        recommended=recommended,
        fits=tuple(find_fits(planner, cluster)),
        states=tuple(
            planner.estimate(cluster, 1, tuned_settings(planner, stage, recommended.configuration.zero.overlaps))
            for stage in allowed_stages(engine.content)
        ),
        activations=tuple(compare_activations(planner, cluster)),
        scaling=tuple(compare_nodes(planner, cluster)),
        end=find_end(model, data, recommended, storage, request),
        storage=storage,
        notes=tuple(find_notes(model, data, recommended, configured, request)),
    )


def table_micro_batches(planner: Planner, cluster: Cluster) -> list[int]:
    """Some of those that divide a rank's rows, spread over all of them."""
    found = micro_batches(planner.engine.total_rows // cluster.world_size)
    if len(found) <= MAX_TABLE_MICRO:
        return found
    doubled = [micro for micro in found if micro & (micro - 1) == 0]
    return (doubled if len(doubled) > 2 else found)[:MAX_TABLE_MICRO]


def compare_activations(planner: Planner, cluster: Cluster) -> list[tuple[Configuration, float]]:
    execution, zero = planner.execution(cluster.accelerator), tuned_settings(planner, 0, overlaps=False)
    found = []
    for choice in recomputation_choices(planner.model.config, execution):
        for micro in table_micro_batches(planner, cluster):
            estimated = planner.estimate(cluster, micro, zero, choice)
            found.append((estimated.configuration, estimated.memory.activations + estimated.memory.workspace))
    return found


def find_fits(planner: Planner, cluster: Cluster) -> list[Fit]:
    """The fastest micro-batch that fits, for each stage and choice of recomputation."""
    execution, fits = planner.execution(cluster.accelerator), []
    micros = micro_batches(planner.engine.total_rows // cluster.world_size)
    for stage in allowed_stages(planner.engine.content):
        zero = tuned_settings(planner, stage, overlaps=cluster.world_size > 1)
        for choice in recomputation_choices(planner.model.config, execution):
            found = [planner.estimate(cluster, micro, zero, choice) for micro in micros]
            fitting = [one for one in found if one.fits]
            best = max(fitting, key=lambda one: one.tokens_per_second) if fitting else None
            fits.append(Fit(zero, choice, best))
    return fits


def compare_nodes(planner: Planner, cluster: Cluster) -> list[tuple[int, Estimate | None]]:
    """The same step on 1, 2, 4 … nodes, each with its own best configuration."""
    counts = sorted({*(2**power for power in range(20) if 2**power < cluster.nodes), cluster.nodes})
    return [(nodes, recommend(planner, replace(cluster, nodes=nodes))) for nodes in counts]


def find_end(model: ModelInput, data: DataInput, found: Estimate, storage: StorageLoad, request: Request) -> ToTheEnd:
    ends = [model.total_steps]
    if data.num_rows is not None:
        ends.append(max(1, model.num_epochs * data.num_rows // found.rows_per_step))
    if request.max_steps is not None:
        ends.append(request.max_steps)
    steps = min(ends)
    hours = steps * found.step_seconds / HOUR / (1 - storage.saving_share)
    gpu_hours = hours * found.world_size
    price = request.dollars_per_gpu_hour
    return ToTheEnd(
        steps=steps,
        tokens=steps * found.tokens_per_step,
        hours=hours,
        gpu_hours=gpu_hours,
        dollars=None if price is None else price * gpu_hours,
    )


def find_notes(
    model: ModelInput, data: DataInput, found: Estimate, configured: Estimate | None, request: Request
) -> list[str]:
    """What the reader should know of the result."""
    notes, execution = [], found.configuration.execution
    if configured is None:
        notes.append("the DeepSpeed JSON's micro-batch and accumulation do not divide its batch on this many ranks")
    elif not configured.fits:
        notes.append(
            f"the DeepSpeed JSON's own settings do not fit: {configured.memory.peak / GIB:,.1f} GiB of "
            f"{configured.usable_gib:,.1f}"
        )
    if execution.pads_attention and model.config.attention_probs_dropout_prob and execution.device == "cuda":
        notes.append(
            "attention_probs_dropout_prob above 0 makes attention compute padded rows (docs/performance.md); with 0 it "
            "skips padding"
        )
    if found.micro_step.launch_seconds > found.micro_step.device_seconds:
        notes.append(
            "micro-steps are bound by kernel launches: the device waits for the host; a larger batch would help"
        )
    if found.configuration.zero.offloads_optimizer:
        notes.append("the time of an optimizer step on the host's processors is not modelled")
    if data.num_rows is not None and model.num_epochs * data.num_rows < model.total_steps * found.rows_per_step:
        notes.append("num_epochs ends the run before total_training_steps does")
    if request.precision == "fp32" and execution.device == "cuda":
        notes.append("fp32 does not use the matrix units: enable bf16 or fp16 in the DeepSpeed JSON")
    return notes

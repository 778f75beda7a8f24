"""A whole plan: the configurations compared, the recommended one, the way to the end, and what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from common.errors import UserError
from training.planning.accelerators import GIB, Accelerator, Cluster
from training.planning.estimate import Estimate
from training.planning.inputs import DataInput, EngineInput, ModelInput
from training.planning.memory import ZeroSettings, estimate_states
from training.planning.recommendation import (
    Planner,
    allowed_stages,
    candidates,
    check_precision,
    deepspeed_json,
    explain_no_fit,
    recommend,
)
from training.planning.workload import PlannedModel

MAX_TABLE_MICRO = 8  # columns of the table of micro-batches
MAX_BYTES_PER_WRITER = 1e9  # per second: one process that serializes and writes a checkpoint file


@dataclass(frozen=True)
class StorageLoad:
    """Load on the shared file system, in bytes and seconds. Ranks together read each block of the data about once."""

    read_bytes_per_second: float
    is_row_size_measured: bool
    checkpoint_bytes: float
    largest_rank_bytes: float
    save_seconds: float
    interval_seconds: float
    kept_bytes: float | None  # None: every checkpoint is kept
    saving_share: float  # of the time that training waits for checkpoints
    write_bytes_per_second: float


@dataclass(frozen=True)
class ToTheEnd:
    """Steps end at total_training_steps, at --max_steps, or where the data's epochs do."""

    steps: int
    tokens: float
    hours: float  # checkpoints included
    gpu_hours: float
    dollars: float | None


@dataclass(frozen=True)
class Plan:
    """What the files and the command line ask for. Everything else follows, and is computed when it is first read."""

    model: ModelInput
    data: DataInput
    engine: EngineInput
    cluster: Cluster
    table: Mapping[str, Accelerator]
    precision: str
    is_pre_ln: bool
    max_steps: int | None
    dollars_per_gpu_hour: float | None
    save_every_minutes: float
    keep_last: int | None
    file_system_gb_per_s: float

    @cached_property
    def planner(self) -> Planner:
        check_precision(self.precision, self.cluster.accelerator)
        planned = PlannedModel(self.model.config, self.data.lengths, self.is_pre_ln)
        return Planner(planned, self.engine, self.precision)

    @cached_property
    def recommended(self) -> Estimate:
        found = recommend(self.planner, self.cluster)
        if found is None:
            raise UserError(explain_no_fit(self.planner, self.cluster, self.table))
        return found

    @cached_property
    def configured(self) -> Estimate | None:
        """The JSON's own settings; None where its micro-batch does not divide the step."""
        if self.engine.micro is None:
            return None
        return self.planner.estimate(self.cluster, self.engine.micro, ZeroSettings.of(self.engine.content))

    @cached_property
    def states(self) -> list[Estimate]:
        """One for each stage, with the smallest micro-batch."""
        stages, overlaps = allowed_stages(self.engine.content), self.recommended.configuration.zero.overlaps
        return [
            self.planner.estimate(self.cluster, 1, self.planner.tuned_settings(stage, overlaps)) for stage in stages
        ]

    @cached_property
    def table_micro_batches(self) -> list[int]:
        """Some of those that divide a rank's rows, spread over all of them."""
        found = self.planner.micro_batches(self.cluster)
        doubled = [micro for micro in found if micro & (micro - 1) == 0]
        return (found if len(found) <= MAX_TABLE_MICRO or len(doubled) <= 2 else doubled)[:MAX_TABLE_MICRO]

    @cached_property
    def activations(self) -> dict[str, list[float]]:
        """Bytes for each of `table_micro_batches`, by recomputation."""
        zero, sizes = self.planner.tuned_settings(0, overlaps=False), {}
        for choice in self.planner.recomputation_choices(self.cluster.accelerator):
            row = [self.planner.estimate(self.cluster, micro, zero, choice) for micro in self.table_micro_batches]
            sizes[row[0].configuration.recomputation] = [
                found.memory.activations + found.memory.workspace for found in row
            ]
        return sizes

    @cached_property
    def fits(self) -> dict[tuple[int, str], Estimate | None]:
        """The fastest micro-batch that fits by stage and recomputation, with overlapped reductions."""
        fastest: dict[tuple[int, str], Estimate | None] = {}
        for found in candidates(self.planner, self.cluster):
            zero, recomputation = found.configuration.zero, found.configuration.recomputation
            if zero.overlaps == (zero.stage > 0 and self.cluster.world_size > 1):
                best = fastest.setdefault((zero.stage, recomputation), None)
                if found.fits and (best is None or found.tokens_per_second > best.tokens_per_second):
                    fastest[zero.stage, recomputation] = found
        return fastest

    @cached_property
    def scaling(self) -> dict[int, Estimate | None]:
        """The same step on 1, 2, 4 … nodes, each with its own best configuration."""
        nodes = self.cluster.nodes
        counts = sorted({*(2**power for power in range(20) if 2**power < nodes), nodes})
        return {count: recommend(self.planner, replace(self.cluster, nodes=count)) for count in counts}

    @cached_property
    def storage(self) -> StorageLoad:
        found, lengths, parameters = self.recommended, self.data.lengths, self.planner.model.parameters
        execution, zero = found.configuration.execution, found.configuration.zero
        # An uncompressed row of a shard: ids, mask, segments, positions and ids of predictions, label.
        row_bytes = lengths.width * (4 + 1 + 1) + lengths.mean_masked * (4 + 4) + 1
        on_device = replace(zero, offloads_optimizer=False, offloads_parameters=False)  # a file holds either
        states = estimate_states(parameters, execution.precision, on_device, world_size=1)
        weights = execution.bytes * parameters.total
        optimizer = states.optimizer + states.master_weights
        total = weights + optimizer
        shares = found.world_size if zero.stage > 0 else 1
        first = optimizer / shares + (weights / shares if zero.stage == 3 else weights)
        seconds = max(total / (1e9 * self.file_system_gb_per_s), first / MAX_BYTES_PER_WRITER)
        interval = 60 * self.save_every_minutes
        return StorageLoad(
            read_bytes_per_second=found.rows_per_second * (self.data.bytes_per_row or row_bytes),
            is_row_size_measured=self.data.bytes_per_row is not None,
            checkpoint_bytes=total,
            largest_rank_bytes=first,
            save_seconds=seconds,
            interval_seconds=interval,
            kept_bytes=None if self.keep_last is None else (self.keep_last + 1) * total,  # one more is being written
            saving_share=seconds / (interval + seconds),
            write_bytes_per_second=total / interval,
        )

    @cached_property
    def end(self) -> ToTheEnd:
        found, ends = self.recommended, [self.model.total_steps]
        if self.data.num_rows is not None:
            ends.append(max(1, self.model.num_epochs * self.data.num_rows // found.rows_per_step))
        if self.max_steps is not None:
            ends.append(self.max_steps)
        steps = min(ends)
        hours = steps * found.step_seconds / 3600 / (1 - self.storage.saving_share)
        gpu_hours, price = hours * found.world_size, self.dollars_per_gpu_hour
        dollars = None if price is None else price * gpu_hours
        return ToTheEnd(steps, steps * found.tokens_per_step, hours, gpu_hours, dollars)

    def deepspeed_json(self) -> dict[str, Any]:
        return deepspeed_json(self.recommended, self.engine.content)

    def notes(self) -> list[str]:
        """What the reader should know of the result."""
        model, data, found, configured = self.model, self.data, self.recommended, self.configured
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
                "attention_probs_dropout_prob above 0 makes attention compute padded rows (docs/performance.md); with "
                "0 it skips padding"
            )
        if found.micro_step.launch_seconds > found.micro_step.device_seconds:
            notes.append(
                "micro-steps are bound by kernel launches: the device waits for the host; a larger batch would help"
            )
        if found.configuration.zero.offloads_optimizer:
            notes.append("the time of an optimizer step on the host's processors is not modelled")
        if data.num_rows is not None and model.num_epochs * data.num_rows < model.total_steps * found.rows_per_step:
            notes.append("num_epochs ends the run before total_training_steps does")
        if self.precision == "fp32" and execution.device == "cuda":
            notes.append("fp32 does not use the matrix units: enable bf16 or fp16 in the DeepSpeed JSON")
        return notes

"""A plan for people, as tables, and for programs, as one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.words import aligned_table, counted
from training.planning.accelerators import GIB
from training.planning.estimate import Estimate
from training.planning.plan import Plan

STATES = ("weights", "master", "gradients", "optimizer", "buffers", "sum")
SECONDS = ("compute s", "comm. s", "exposed s", "optimizer s", "step s")
STEP_COLUMNS = ("micro × acc.", "ZeRO", "GiB", *SECONDS, "tokens/s", "MFU")


def format_report(plan: Plan) -> list[str]:
    backend = plan.recommended.configuration.execution.backend
    return [
        *_describe_inputs(plan),
        "",
        "memory per rank without activations, GiB",
        *_states_table(plan.states),
        "",
        f"activations and temporaries per rank by micro-batch, GiB (attention: {backend})",
        *_table(
            ["recomputation", *map(str, plan.table_micro_batches)],
            [[choice, *map(_gib, sizes)] for choice, sizes in plan.activations.items()],
        ),
        "",
        "fastest micro-batch that fits: rows (thousand tokens/s)",
        *_fits_table(plan),
        "",
        "a step",
        *_table(
            ["", *STEP_COLUMNS],
            [
                *([] if plan.configured is None else [_step_row("as configured", plan.configured)]),
                _step_row("recommended", plan.recommended),
            ],
        ),
        "",
        *_describe_totals(plan),
        *(["", "nodes", *_scaling_table(plan)] if len(plan.scaling) > 1 else []),
        "",
        _describe_recommendation(plan),
        *(f"note: {note}" for note in plan.notes()),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned_table([header, *rows], others=">")]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _describe_inputs(plan: Plan) -> list[str]:
    config, lengths, accelerator = plan.model.config, plan.data.lengths, plan.cluster.accelerator
    planned = plan.planner.model
    return [
        f"model      {plan.model.name}: {counted(config.num_hidden_layers, 'layer')} × {config.hidden_size}, "
        f"{planned.parameters.total:,} parameters, {planned.flops_per_token / 1e9:.3f} GFLOP per token",
        f"data       rows of {lengths.width}, {lengths.mean:.1f} tokens and {lengths.mean_masked:.1f} predictions on "
        f"average ({plan.data.origin})",
        f"cluster    {plan.cluster.nodes:,} × {plan.cluster.gpus_per_node} {accelerator.name}: "
        f"{accelerator.matmul_flops(plan.precision) / 1e12:,.4g} TFLOP/s in {plan.precision} "
        f"({accelerator.efficiency:.0%} of the peak: {accelerator.efficiency_origin})",
        f"           {accelerator.usable_gib:,.1f} GiB usable; per GPU {accelerator.intra_node_gb_per_s:,.4g} GB/s "
        f"within a node, {accelerator.inter_node_gb_per_s:,.4g} GB/s between nodes",
        f"step       {counted(plan.engine.total_rows, 'row')}, {plan.recommended.tokens_per_step:,.0f} tokens",
    ]


def _states_table(states: Sequence[Estimate]) -> list[str]:
    has_host = any(found.memory.host for found in states)
    rows = []
    for found in states:
        memory = found.memory
        sizes = [memory.weights, memory.master_weights, memory.gradients, memory.optimizer, memory.buffers]
        sizes += [memory.states + memory.buffers, *([memory.host] if has_host else [])]
        rows.append([f"ZeRO {found.configuration.zero.stage}", *map(_gib, sizes)])
    return _table(["", *STATES, *(["on the host"] if has_host else [])], rows)


def _fits_table(plan: Plan) -> list[str]:
    stages = sorted({stage for stage, _ in plan.fits})
    rows: dict[str, list[str]] = {}
    for (_, recomputation), found in plan.fits.items():
        text = "–" if found is None else f"{found.configuration.micro} ({found.tokens_per_second / 1e3:,.0f})"
        rows.setdefault(recomputation, [recomputation]).append(text)
    return _table(["recomputation", *(f"ZeRO {stage}" for stage in stages)], list(rows.values()))


def _step_row(name: str, found: Estimate) -> list[str]:
    configuration, communication = found.configuration, found.communication
    seconds = (found.compute_seconds, communication.seconds, communication.exposed_seconds, found.optimizer_seconds)
    return [
        name if found.fits else f"{name} (does not fit)",
        f"{configuration.micro} × {configuration.accumulation}",
        f"{configuration.zero.stage}{' overlapped' if configuration.zero.overlaps else ''}",
        f"{found.memory.peak / GIB:,.1f}",
        *(f"{value:.4f}" for value in (*seconds, found.step_seconds)),
        f"{found.tokens_per_second:,.0f}",
        f"{found.utilization:.1%}",
    ]


def _describe_totals(plan: Plan) -> list[str]:
    end, load = plan.end, plan.storage
    cost = "" if end.dollars is None else f", ${end.dollars:,.0f}"
    measured = "" if load.is_row_size_measured else " at most, uncompressed"
    kept = "all are kept" if load.kept_bytes is None else f"{load.kept_bytes / 1e9:,.1f} GB for those kept"
    return [
        f"to the end {counted(end.steps, 'step')}, {end.tokens / 1e9:,.1f} billion tokens: {end.hours:,.1f} hours, "
        f"{end.gpu_hours:,.0f} GPU hours{cost}",
        f"reading    {load.read_bytes_per_second / 1e6:,.1f} MB/s by all ranks{measured}",
        f"saving     {load.checkpoint_bytes / 1e9:,.1f} GB per checkpoint ({load.largest_rank_bytes / 1e9:,.2f} GB by "
        f"rank 0), {load.save_seconds:,.1f} s every {load.interval_seconds / 60:,.0f} minutes "
        f"({load.saving_share:.1%} of the time), {kept}",
    ]


def _scaling_table(plan: Plan) -> list[str]:
    first = next((found for found in plan.scaling.values() if found is not None), None)
    rows = []
    for nodes, found in plan.scaling.items():
        cells = [f"{nodes:,}", f"{nodes * plan.cluster.gpus_per_node:,}"]
        if found is None or first is None:
            rows.append([*cells, *["–"] * 5])
            continue
        efficiency = found.tokens_per_second / found.world_size / (first.tokens_per_second / first.world_size)
        rows.append(
            [
                *cells,
                f"{found.configuration.micro} × {found.configuration.accumulation}",
                str(found.configuration.zero.stage),
                f"{found.tokens_per_second:,.0f}",
                f"{efficiency:.0%}",
                f"{plan.end.steps * found.step_seconds / 3600:,.1f}",
            ]
        )
    return _table(["nodes", "GPUs", "micro × acc.", "ZeRO", "tokens/s", "efficiency", "hours"], rows)


def _describe_recommendation(plan: Plan) -> str:
    configuration = plan.recommended.configuration
    return (
        f"recommended: ZeRO stage {configuration.zero.stage}, micro-batch {configuration.micro}, "
        f"accumulation {configuration.accumulation}, overlap_comm {str(configuration.zero.overlaps).lower()}; launcher "
        f"flags for recomputation: {configuration.recomputation}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    accelerator, planned = plan.cluster.accelerator, plan.planner.model
    return {
        "model": {
            "name": plan.model.name,
            "parameters": planned.parameters.total,
            "model_flops_per_token": planned.flops_per_token,
        },
        "data": {**asdict(plan.data.lengths), "origin": plan.data.origin, "num_rows": plan.data.num_rows},
        "cluster": {
            "accelerator": accelerator.name,
            "gpus_per_node": plan.cluster.gpus_per_node,
            "nodes": plan.cluster.nodes,
            "world_size": plan.cluster.world_size,
            "matmul_flops": accelerator.matmul_flops(plan.precision),
            "efficiency_origin": accelerator.efficiency_origin,
        },
        "precision": plan.precision,
        "rows_per_step": plan.engine.total_rows,
        "tokens_per_step": plan.recommended.tokens_per_step,
        "configured": None if plan.configured is None else plan.configured.as_dict(),
        "recommended": plan.recommended.as_dict(),
        "stages": [found.as_dict() for found in plan.states],
        "fitting": [found.as_dict() for found in plan.fits.values() if found is not None],
        "scaling": [{"nodes": nodes, **(found.as_dict() if found else {})} for nodes, found in plan.scaling.items()],
        "to_the_end": asdict(plan.end),
        "storage": asdict(plan.storage),
        "deepspeed_json": plan.deepspeed_json(),
        "notes": plan.notes(),
    }

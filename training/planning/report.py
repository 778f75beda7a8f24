"""A plan for people, as tables, and for programs, as one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.words import counted
from training.planning.accelerators import GIB
from training.planning.estimate import Estimate, describe_recomputation
from training.planning.plan import Plan
from training.planning.published import Published

MEMORY_PARTS = {
    "weights": "weights",
    "master_weights": "master",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "buffers",
}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first is aligned to the left."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def format_report(plan: Plan) -> list[str]:
    return [
        *_describe_inputs(plan),
        "",
        "memory per rank without activations, GiB",
        *_states_table(plan),
        "",
        f"activations and temporaries per rank by micro-batch, GiB (attention: {_backend(plan)})",
        *_activations_table(plan),
        "",
        "fastest micro-batch that fits: rows (thousand tokens/s)",
        *_fits_table(plan),
        "",
        "a step",
        *_steps_table(plan),
        "",
        *_describe_end(plan),
        *_describe_storage(plan),
        *(["", "nodes", *_scaling_table(plan)] if len(plan.scaling) > 1 else []),
        "",
        *_describe_recommendation(plan),
        *(f"note: {note}" for note in plan.notes),
    ]


def _backend(plan: Plan) -> str:
    return plan.recommended.configuration.execution.backend


def _describe_inputs(plan: Plan) -> list[str]:
    config, lengths, accelerator = plan.model.config, plan.data.lengths, plan.cluster.accelerator
    within, between = accelerator.intra_node_bytes_per_s / 1e9, accelerator.inter_node_bytes_per_s / 1e9
    return [
        f"model      {plan.model.name}: {counted(config.num_hidden_layers, 'layer')} × {config.hidden_size}, "
        f"{plan.parameters.total:,} parameters, {plan.flops_per_token / 1e9:.3f} GFLOP per token",
        f"data       rows of {lengths.width}, {lengths.mean:.1f} tokens and {lengths.mean_masked:.1f} predictions on "
        f"average ({plan.data.origin})",
        f"cluster    {plan.cluster.nodes:,} × {plan.cluster.gpus_per_node} {accelerator.name}: "
        f"{accelerator.matmul_flops(plan.request.precision) / 1e12:,.4g} TFLOP/s in {plan.request.precision} "
        f"({accelerator.efficiency:.0%} of the peak: {accelerator.efficiency_origin})",
        f"           {accelerator.usable_gib:,.1f} GiB usable; per GPU {within:,.4g} GB/s within a node, "
        f"{between:,.4g} GB/s between nodes",
        f"step       {counted(plan.engine.total_rows, 'row')}, {plan.recommended.tokens_per_step:,.0f} tokens",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _states_table(plan: Plan) -> list[str]:
    rows = []
    for found in plan.states:
        parts = found.memory.parts()
        total = found.memory.states + found.memory.buffers
        host = [_gib(found.memory.host)] if any(one.memory.host for one in plan.states) else []
        rows.append(
            [
                f"ZeRO {found.configuration.zero.stage}",
                *(_gib(parts[part]) for part in MEMORY_PARTS),
                _gib(total),
                *host,
            ]
        )
    header = ["", *MEMORY_PARTS.values(), "sum", *(["on the host"] if len(rows[0]) > len(MEMORY_PARTS) + 2 else [])]
    return format_table(header, rows)


def _activations_table(plan: Plan) -> list[str]:
    micros = sorted({configuration.micro for configuration, _ in plan.activations})
    by_choice: dict[str, dict[int, float]] = {}
    for configuration, size in plan.activations:
        by_choice.setdefault(configuration.recomputation, {})[configuration.micro] = size
    rows = [[choice, *(_gib(sizes[micro]) for micro in micros)] for choice, sizes in by_choice.items()]
    return format_table(["recomputation", *map(str, micros)], rows)


def _fits_table(plan: Plan) -> list[str]:
    stages = sorted({fit.zero.stage for fit in plan.fits})
    cells: dict[str, dict[int, str]] = {}
    for fit in plan.fits:
        found, name = fit.found, describe_recomputation(fit.choice)
        text = "–" if found is None else f"{found.configuration.micro} ({found.tokens_per_second / 1e3:,.0f})"
        cells.setdefault(name, {})[fit.zero.stage] = text
    rows = [[name, *(row[stage] for stage in stages)] for name, row in cells.items()]
    return format_table(["recomputation", *(f"ZeRO {stage}" for stage in stages)], rows)


def _steps_table(plan: Plan) -> list[str]:
    named = [("recommended", plan.recommended)]
    if plan.configured is not None:
        named.insert(0, ("as configured", plan.configured))
    header = ["", "micro × acc.", "ZeRO", "GiB", "compute s", "comm. s", "exposed s", "optimizer s", "step s"]
    header += ["tokens/s", "MFU"]
    return format_table(header, [_step_row(name, found) for name, found in named])


def _step_row(name: str, found: Estimate) -> list[str]:
    configuration = found.configuration
    seconds = (
        found.compute_seconds,
        found.communication.seconds,
        found.communication.exposed_seconds,
        found.optimizer_seconds,
        found.step_seconds,
    )
    return [
        name if found.fits else f"{name} (does not fit)",
        f"{configuration.micro} × {configuration.accumulation}",
        f"{configuration.zero.stage}{' overlapped' if configuration.zero.overlaps else ''}",
        f"{found.memory.peak / GIB:,.1f}",
        *(f"{value:.4f}" for value in seconds),
        f"{found.tokens_per_second:,.0f}",
        f"{found.utilization:.1%}",
    ]


def _describe_end(plan: Plan) -> list[str]:
    end = plan.end
    cost = "" if end.dollars is None else f", ${end.dollars:,.0f}"
    return [
        f"to the end {counted(end.steps, 'step')}, {end.tokens / 1e9:,.1f} billion tokens: {end.hours:,.1f} hours, "
        f"{end.gpu_hours:,.0f} GPU hours{cost}",
    ]


def _describe_storage(plan: Plan) -> list[str]:
    load = plan.storage
    measured = "" if load.is_row_size_measured else " at most, uncompressed"
    kept = "all are kept" if load.kept_bytes is None else f"{load.kept_bytes / 1e9:,.1f} GB for those kept"
    return [
        f"reading    {load.read_bytes_per_second / 1e6:,.1f} MB/s by all ranks{measured}",
        f"saving     {load.checkpoint_bytes / 1e9:,.1f} GB per checkpoint ({load.largest_rank_bytes / 1e9:,.2f} GB by "
        f"rank 0), {load.save_seconds:,.1f} s every {load.interval_seconds / 60:,.0f} minutes "
        f"({load.saving_share:.1%} of the time), {kept}",
    ]


def _scaling_table(plan: Plan) -> list[str]:
    first = next((found for _, found in plan.scaling if found is not None), None)
    rows = []
    for nodes, found in plan.scaling:
        if found is None or first is None:
            rows.append([f"{nodes:,}", f"{nodes * plan.cluster.gpus_per_node:,}", *["–"] * 5])
            continue
        hours = plan.end.steps * found.step_seconds / 3600
        efficiency = found.tokens_per_second / found.world_size / (first.tokens_per_second / first.world_size)
        rows.append(
            [
                f"{nodes:,}",
                f"{found.world_size:,}",
                f"{found.configuration.micro} × {found.configuration.accumulation}",
                str(found.configuration.zero.stage),
                f"{found.tokens_per_second:,.0f}",
                f"{efficiency:.0%}",
                f"{hours:,.1f}",
            ]
        )
    return format_table(["nodes", "GPUs", "micro × acc.", "ZeRO", "tokens/s", "efficiency", "hours"], rows)


def _describe_recommendation(plan: Plan) -> list[str]:
    configuration = plan.recommended.configuration
    flags = configuration.recomputation
    return [
        f"recommended: ZeRO stage {configuration.zero.stage}, micro-batch {configuration.micro}, "
        f"accumulation {configuration.accumulation}, overlap_comm {str(configuration.zero.overlaps).lower()}; launcher "
        f"flags for recomputation: {flags}",
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    accelerator = plan.cluster.accelerator
    return {
        "model": {
            "name": plan.model.name,
            "parameters": plan.parameters.total,
            "model_flops_per_token": plan.flops_per_token,
        },
        "data": {**asdict(plan.data.lengths), "origin": plan.data.origin, "num_rows": plan.data.num_rows},
        "cluster": {
            "accelerator": accelerator.name,
            "gpus_per_node": plan.cluster.gpus_per_node,
            "nodes": plan.cluster.nodes,
            "world_size": plan.cluster.world_size,
            "matmul_flops": accelerator.matmul_flops(plan.request.precision),
            "efficiency_origin": accelerator.efficiency_origin,
        },
        "precision": plan.request.precision,
        "rows_per_step": plan.engine.total_rows,
        "tokens_per_step": plan.recommended.tokens_per_step,
        "configured": None if plan.configured is None else plan.configured.as_dict(),
        "recommended": plan.recommended.as_dict(),
        "stages": [found.as_dict() for found in plan.states],
        "fitting": [fit.found.as_dict() for fit in plan.fits if fit.found is not None],
        "scaling": [{"nodes": nodes, **({} if found is None else found.as_dict())} for nodes, found in plan.scaling],
        "to_the_end": asdict(plan.end),
        "storage": plan.storage.as_dict(),
        "deepspeed_json": plan.deepspeed_json(),
        "notes": list(plan.notes),
    }


def published_table(figures: Sequence[Published]) -> list[str]:
    """The Markdown table of docs/planning.md."""
    lines = ["| run | unit | published | predicted | error |", "|---|---|---:|---:|---:|"]
    for figure in figures:
        mark = " (calibration)" if figure.is_calibration else ""
        lines.append(
            f"| {figure.label}{mark} | {figure.unit} | {_short(figure.value)} | {_short(figure.predict())} "
            f"| {figure.error:+.0%} |"
        )
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

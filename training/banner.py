"""The banner: what is about to be trained, shown before the first step."""

from pathlib import Path

import torch

from common.console import console
from common.words import counted, format_count, format_seconds
from nvidia.attention.registry import cuda_capability
from nvidia.config import BertConfig
from nvidia.interop.stock_config import export_obstacles
from training.build import Run
from training.checkpoints.resume import ResumePoint
from training.clock import Clock
from training.engine.movement import describe_muon
from training.inputs.datasets import Datasets, describe_rows
from training.notes import find_attention_notes, find_model_notes, find_notes, find_warnings
from training.plan.horizon import Outlook, look_ahead
from training.plan.step_plan import StepPlan
from training.settings.flags import ProbeFlags


def show_banner(run: Run) -> None:
    """Show the run's table and notes on the console, and the user's files in TensorBoard."""
    settings = run.settings
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.module.parameters())
    console.say(settings.job_name)
    facts = _find_facts(run, num_parameters)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.say(f"  {name:<{width}}  {value}")
    for warning in _find_warnings(run):
        console.warn(warning)
    for note in _find_notes(run, num_parameters):
        console.say(f"note: {note}")
    for name, text in settings.sources.items():
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        run.sinks.text(name, f"```json\n{shown}\n```")


def _find_facts(run: Run, num_parameters: int) -> dict[str, str]:
    """The rows of the table."""
    settings, batch, clock, data = run.settings, run.settings.deepspeed.batch, run.clock, run.datasets
    config, flags, probes = settings.model_config, settings.training_flags, settings.probe_flags
    muon = describe_muon(run.engine)
    outlook = look_ahead(clock.horizon, run.progress.step, run.progress.samples)
    return {
        "model": f"{'pre-LN' if settings.model_flags.preln else 'post-LN'}, "
        f"{counted(config.num_hidden_layers, 'layer')} of {config.hidden_size}, {config.num_tokens:,} tokens, "
        f"{num_parameters:,} parameters",
        "batch": f"{counted(batch.total, 'row')} of {settings.data_flags.max_seq_length}: {batch.micro} × "
        f"{counted(batch.accumulation, 'micro-step')} × {counted(run.rank_info.world_size, 'rank')}"
        + (f", then {flags.batch_schedule}" if flags.batch_schedule else ""),
        "data": f"{describe_phases(data, clock.horizon.plan)}, about {format_count(outlook.data_tokens)} tokens",
        "validation": "none" if data.validation is None else describe_rows(data.validation, data.validation_length),
        **({} if probes.probe is None else {"probes": describe_probes(probes, flags.validate_every_steps)}),
        "length": describe_length(clock, outlook),
        "engine": f"{settings.deepspeed.describe_precision(settings.precision)}, ZeRO stage "
        f"{settings.deepspeed.zero_stage}, {run.device.type}, "
        f"{counted(torch.get_num_threads(), 'thread')} per rank",
        "products": run.libraries,
        "lr": f"{flags.lr_schedule}, peak {settings.training.learning_rate:g}"
        + (f", over {flags.time_budget}" if flags.time_budget else ""),
        **({} if muon is None else {"optimizer": muon}),
        "checkpoints": str(settings.saved_models),
        "logs": str(settings.runs),
        "start": describe_start(config, settings.first_weights, run.resume_point),
    }


def _find_warnings(run: Run) -> list[str]:
    settings, batches = run.settings, run.settings.training_flags.batch_schedule
    optimizer = settings.deepspeed.content.get("optimizer", {})
    return find_warnings(
        run.clock.horizon,
        run.clock.schedule,
        optimizer=optimizer.get("type", "AdamW"),
        rows=int(batches.points[-1][1]) if batches else settings.deepspeed.batch.total,
        weight_decay=optimizer.get("params", {}).get("weight_decay", settings.training.weight_decay),
    )


def _find_notes(run: Run, num_parameters: int) -> list[str]:
    settings, config = run.settings, run.settings.model_config
    obstacles = export_obstacles(config, settings.model_flags.preln)
    notes = find_notes(
        run.clock.horizon,
        run.clock.schedule,
        num_parameters=num_parameters,
        output_dir=settings.output_dir,
        has_validation=run.datasets.validation is not None,
    )
    notes += find_model_notes(config, settings.data_flags.max_seq_length)
    notes += [f"the model cannot be exported to transformers: {why}" for why in obstacles]
    if not settings.model_flags.deepspeed_transformer_kernel:  # which has its own attention kernels and dropout
        notes += find_attention_notes(config, settings.precision, run.device.type, cuda_capability(run.device))
    return notes


def describe_probes(flags: ProbeFlags, validate_every: int | None) -> str:
    every = flags.probe_every_steps or validate_every
    when = "at the end" if every is None else f"every {counted(every, 'step')} and at the end"
    return f"{', '.join(Path(word).name for word in flags.probe or ())}, {when}"


def describe_start(config: BertConfig, first_weights: Path | None, point: ResumePoint | None) -> str:
    if point is not None:
        return f"from {'the weights of ' if point.is_only_weights else ''}{point.path}"
    if first_weights is not None:
        return f"from the weights of {first_weights}"
    parts = ["from new weights"]
    parts += ["the decoder bias from token frequencies"] * (config.decoder_bias_init == "unigram")
    parts += ["the word embeddings from neighbouring tokens"] * (config.embedding_init == "cooccurrence")
    return ", ".join(parts)


def describe_length(clock: Clock, outlook: Outlook) -> str:
    """How far the run goes. With a time budget the steps are an upper bound."""
    left = f"{outlook.epochs_left:.2f} epochs, about {format_count(outlook.tokens_left)} tokens left"
    last_step, budget = f"step {clock.horizon.last_step():,}", clock.budget
    if budget.total is None:
        return f"to {last_step}: {left}"
    return (
        f"{format_seconds(budget.total)} in total, {format_seconds(budget.left())} of training left; at most to "
        f"{last_step}: {left}"
    )


def describe_phases(datasets: Datasets, plan: StepPlan) -> str:
    """Each phase's data, and the row of the run at which it begins."""
    return ", ".join(
        (f"then from row {phase.first_sample:,} of the run " if phase.first_sample else "")
        + describe_rows(datasets.training[phase.index], phase.length)
        for phase in plan.phases
    )

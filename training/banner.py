"""The banner: what is about to be trained, shown before the first step, and what the user may not expect of it."""

import shutil
from pathlib import Path

import torch

from common.console import console
from common.words import counted, format_count, format_seconds
from nvidia.attention.registry import choose_backend, cuda_capability
from nvidia.config import BertConfig
from nvidia.interop.stock_config import export_obstacles
from nvidia.self_attention import training_context
from training.build import Run
from training.checkpoints.resume import ResumePoint
from training.clock import Clock
from training.engine.gradients import describe_muon
from training.inputs.datasets import Datasets, describe_rows
from training.plan.horizon import Horizon, Outlook, look_ahead
from training.plan.learning_rate import Schedule
from training.plan.step_plan import StepPlan
from training.runtime.precision import DTYPES
from training.settings.flags import ProbeFlags

# Weights, master weights and two moments, as DeepSpeed writes them, in bytes per parameter.
CHECKPOINT_BYTES = 16

# The highest peak of the learning rate at which each optimizer has trained a BERT of any size, with some margin; the
# published ones are 4e-4 (AdamW) and 0.011 (Lamb), and small models with Muon take 0.008.
MAX_RATES = {"adam": 0.01, "adamw": 0.01, "lamb": 0.05, "muon": 0.1}
MAX_OTHER_RATE = 0.1
MIN_RATE = 1e-7
MIN_ROWS = 8  # per step; BERT used 256
MAX_WARMUP = 0.5  # of the schedule
MAX_WEIGHT_DECAY = 0.5


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
    config, flags, probes = settings.model_config, settings.flags.training, settings.flags.probes
    muon = describe_muon(run.engine)
    outlook = look_ahead(clock.horizon, run.progress.step, run.progress.samples)
    return {
        "model": f"{'pre-LN' if settings.flags.model.preln else 'post-LN'}, "
        f"{counted(config.num_hidden_layers, 'layer')} of {config.hidden_size}, {config.num_tokens:,} tokens, "
        f"{num_parameters:,} parameters",
        "batch": f"{counted(batch.total, 'row')} of {settings.flags.data.max_seq_length}: {batch.micro} × "
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
    settings, batches = run.settings, run.settings.flags.training.batch_schedule
    if run.progress.step >= run.clock.horizon.last_step():
        return []  # nothing is left to train
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
    obstacles = export_obstacles(config, settings.flags.model.preln)
    notes = find_notes(
        run.clock.horizon,
        run.clock.schedule,
        num_parameters=num_parameters,
        output_dir=settings.output_dir,
        has_validation=run.datasets.validation is not None,
    )
    notes += find_model_notes(config, settings.flags.data.max_seq_length)
    notes += [f"the model cannot be exported to transformers: {why}" for why in obstacles]
    if not settings.flags.model.deepspeed_transformer_kernel:  # which has its own attention kernels and dropout
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


def find_warnings(horizon: Horizon, schedule: Schedule, *, optimizer: str, rows: int, weight_decay: float) -> list[str]:
    """Values far outside what has ever worked. `rows` are those of the last steps."""
    warnings = []
    peak, max_rate = schedule.peak, MAX_RATES.get(optimizer.lower(), MAX_OTHER_RATE)
    if peak > max_rate:
        warnings.append(
            f"the learning rate of {peak:g} is far above those at which {optimizer} has trained a BERT (up to about "
            f"{max_rate:g}), and the loss will probably diverge; pass for example --learning_rate 1e-4"
        )
    if peak < MIN_RATE:
        warnings.append(
            f"the learning rate of {peak:g} is so low that the model will hardly learn; pass for example "
            f"--learning_rate 1e-4"
        )
    is_timed = horizon.total_steps != schedule.total_steps  # then warm-up and decay are shares of the time
    if schedule.warmup_steps > horizon.last_step() - schedule.origin and not is_timed:
        warnings.append(
            f"the run ends before the end of its warm-up ({counted(round(schedule.warmup_steps), 'step')}), so the "
            f"learning rate never reaches its peak; lower warmup_proportion or total_training_steps"
        )
    elif schedule.warmup_proportion > MAX_WARMUP:
        warnings.append(
            f"the warm-up takes {schedule.warmup_proportion:.0%} of the schedule, usually 1% to 10%; lower "
            f"warmup_proportion"
        )
    if rows < MIN_ROWS:
        warnings.append(
            f"a step has only {counted(rows, 'row')}, so its gradient is mostly noise (BERT used 256 rows); pass for "
            f"example --train_batch_size 256"
        )
    if weight_decay > MAX_WEIGHT_DECAY:
        warnings.append(
            f"a weight decay of {weight_decay:g} is far above those that have worked (0.01 to 0.1) and pulls the "
            f"weights to zero; lower weight_decay"
        )
    return warnings


def find_notes(
    horizon: Horizon, schedule: Schedule, *, num_parameters: int, output_dir: Path, has_validation: bool
) -> list[str]:
    """Notes on the end of the schedule, validation data and free disk space."""
    notes = []
    last, end = horizon.last_step(), schedule.origin + schedule.total_steps
    is_timed = horizon.total_steps != schedule.total_steps  # then warm-up and decay are shares of the time
    if last < end and horizon.max_steps is None and not is_timed:  # --max_steps is the user's intention
        share = schedule.rate(last) / schedule.peak
        notes.append(
            f"the run ends at step {last:,}, before the end of the schedule at {end:,} (total_training_steps): the "
            f"learning rate will then be {share:.0%} of the peak"
        )
    if not has_validation:
        notes.append(
            "there is no validation data, so the loss on unseen text is not measured and there is no best checkpoint; "
            'set the model JSON\'s "validation", for example {"path": "hdf5"}, to a folder with validation shards, '
            "which data.prepare --validation_share 0.05 writes"
        )
    folder = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free, num_parameters * CHECKPOINT_BYTES
    if free < 2 * needed:
        notes.append(
            f"{folder} has {free / 2**30:.1f} GiB free, and a checkpoint takes about {needed / 2**30:.1f} GiB; free "
            f"some space, or pass --keep_last"
        )
    return notes


def find_model_notes(config: BertConfig, row_length: int) -> list[str]:
    """Parts of the model that have no effect on this data."""
    notes = []
    if config.attention_window // 2 >= row_length - 1 > 0:
        notes.append(
            f"attention_window is {config.attention_window}, so in rows of {row_length} tokens every token sees all "
            "others; the window has an effect only on longer rows"
        )
    if config.has_sentence_head and not config.type_vocab_size:
        notes.append(
            f"the model learns sentence pairs (sentence_head {config.sentence_head!r}) but has no embeddings of "
            "segments (type_vocab_size 0): only [SEP] separates the sentences of a pair"
        )
    return notes


def find_attention_notes(
    config: BertConfig, precision: str, device: str, capability: tuple[int, int] | None
) -> list[str]:
    """A note if attention dropout prevents a faster backend; the fastest GPU kernels have no dropout."""
    if device == "cpu" or config.attention_backend != "auto":
        return []
    given = training_context(config, device, DTYPES[precision], capability)
    taken, faster = choose_backend("auto", given), choose_backend("auto", given._replace(dropout_prob=0.0))
    if taken == faster:
        return []
    has_window = config.is_sparse or config.attention_window
    jagged = "" if has_window else ", or try attention_backend 'jagged', which has not been run on a GPU"
    return [
        f"attention is computed by {taken!r}, including padding, because the faster {faster!r} has no dropout and "
        f"attention_probs_dropout_prob is {config.attention_probs_dropout_prob}; set it to 0 in the model "
        f"JSON{jagged}"
    ]

"""What a run's loop consists of beside the engine: saver, validator, prober, previews and the report window."""

import math
from functools import partial
from typing import NamedTuple

from training.build import Run, retention_of
from training.checkpoints.saving import SavePolicy, Saver
from training.guesses import ModelPreview, choose_sentences
from training.metrics.flops import MatmulProbe, RankPace
from training.metrics.window import MetricsWindow
from training.probing import PREFIX, Prober, choose_probe_tasks, load_probes
from training.runtime import collectives
from training.runtime.precision import DTYPES
from training.settings.flags import CheckpointFlags, ProbeFlags
from training.validation import Validator, validation_rows


class LoopParts(NamedTuple):
    """What follows steps of a run, also of one that has reached its end."""

    saver: Saver
    validator: Validator | None  # None: there is no validation data
    prober: Prober | None  # None: there is no --probe
    preview: ModelPreview


def all_ranks_build_parts(run: Run) -> LoopParts:
    return LoopParts(_build_saver(run), _build_validator(run), _build_prober(run), _all_ranks_build_preview(run))


def _build_saver(run: Run) -> Saver:
    flags = run.settings.flags.checkpoints
    policy = SavePolicy(
        retention_of(flags),
        every_steps=flags.save_every_steps,
        every_minutes=flags.save_every_minutes or math.inf,
        epochs=flags.ckpt_to_save,
    )
    horizon, budget, sources = run.clock.horizon, run.clock.budget, run.settings.sources
    return Saver(run.checkpoints, run.engine, run.progress, horizon, budget, run.stop, policy, sources, run.timer.begin)


def _build_validator(run: Run) -> Validator | None:
    settings, dataset, length = run.settings, run.datasets.validation, run.datasets.validation_length
    if dataset is None:
        return None
    rows = validation_rows(settings.deepspeed.batch.micro, settings.flags.data.max_seq_length, length)
    clock, timer, stop, keep_best = run.clock, run.timer, run.stop, settings.flags.checkpoints.keep_best
    probe = watched_probe(settings.flags.probes, settings.flags.checkpoints)
    is_watched = settings.flags.probes.stop_after_no_gain is not None and probe is None
    return Validator(
        run.engine, dataset, rows, run.rank_info, run.device, stop, timer, clock, run.sinks, keep_best, is_watched
    )


def watched_probe(flags: ProbeFlags, checkpoint_flags: CheckpointFlags) -> str | None:
    """The probe that chooses the best checkpoint or ends the run; None: the validation loss does, or nothing."""
    by = checkpoint_flags.keep_best_by
    ends_run = flags.stop_after_no_gain is not None and not checkpoint_flags.keep_best
    if by is not None or flags.probe is None or not ends_run:
        return by
    return PREFIX + choose_probe_tasks(flags.probe)[0].name


def _build_prober(run: Run) -> Prober | None:
    settings, flags = run.settings, run.settings.flags.probes
    if flags.probe is None:
        return None
    assert settings.tokenizer is not None
    probes = load_probes(flags, settings.tokenizer, settings.model_config.max_position_embeddings)
    every = flags.probe_every_steps or settings.flags.training.validate_every_steps
    keeps_best = settings.flags.checkpoints.keep_best_by is not None
    return Prober(
        run.engine, probes, run.rank_info, run.stop, run.timer, run.clock, run.sinks, every, flags.probe_seconds,
        watched_probe(flags, settings.flags.checkpoints), keeps_best,
    )  # fmt: skip


def _all_ranks_build_preview(run: Run) -> ModelPreview:
    settings = run.settings
    dataset, path = run.datasets.validation or run.datasets.training[-1], settings.flags.training.sample_sentences
    choose = partial(choose_sentences, settings.tokenizer, dataset, path, settings.flags.data.max_seq_length)
    return ModelPreview(
        settings.tokenizer,
        collectives.all_ranks_read(choose),
        run.engine,
        run.sinks,
        run.device,
        is_main=run.rank_info.is_main,
        is_partitioned=settings.deepspeed.zero_stage == 3,
        with_histograms=settings.flags.training.log_histograms,
    )


def all_ranks_build_window(run: Run) -> MetricsWindow:
    """The report window. Measures the machine's matmul speed on all ranks, which takes a third of a second."""
    settings = run.settings
    num_tokens = settings.deepspeed.batch.micro * settings.flags.data.max_seq_length
    probe = MatmulProbe(settings.model_config, num_tokens, DTYPES[settings.precision], run.device)
    collectives.all_ranks_barrier()  # all ranks measure at the same time
    speeds = collectives.all_ranks_gather(probe.measure_speed())
    needs_probe = settings.deepspeed.zero_stage == 3 and run.rank_info.world_size > 1
    pace = RankPace(probe if needs_probe else None, min(speeds))
    run.timer.lap()  # the time until here is not part of the first window
    return MetricsWindow(settings.model_config, run.rank_info, run.device, run.timer, pace, sum(speeds))

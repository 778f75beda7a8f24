"""A run, built from its settings: data, model, engine, plan, checkpoints and outputs, resumed from its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from common.console import console
from data.randomness import seed_of
from data.shards.statistics import log_frequencies, word_vectors
from nvidia.checkpointing import Checkpointing, default_chunk
from nvidia.compiling import compile_blocks
from nvidia.config import BertConfig
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from training.checkpoints.folder import Retention
from training.checkpoints.loading import all_ranks_load_engine
from training.checkpoints.remote import RemoteCheckpoints, Uploader
from training.checkpoints.resume import ResumePoint, ResumeRequest, all_ranks_lock_resume_point
from training.checkpoints.state import Best, Progress, Skips, TrainingState, read_skips, read_state
from training.checkpoints.writer import CheckpointWriter
from training.clock import Clock, all_ranks_count_lost_time, build_clock
from training.engine.build import build_engine, detach_monitor
from training.engine.gradients import GradientNorm
from training.engine.kernel import layer_factory, use_kernel
from training.export.hugging_face import load_hugging_face_weights, read_weights
from training.inputs.datasets import Datasets
from training.libraries import all_ranks_choose_libraries
from training.metrics.sinks import Sinks
from training.metrics.timing import SectionTimer
from training.optimizers.build import build_optimizer, set_rate_factors
from training.runtime import collectives
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests
from training.settings.flags import CheckpointFlags, ModelFlags
from training.settings.resolve import Settings


@dataclass(frozen=True)
class Run:
    """The parts of a run. The loop and the dry run take them apart; no helper gets this."""

    settings: Settings
    rank_info: RankInfo
    device: torch.device
    datasets: Datasets
    resume_point: ResumePoint | None
    engine: Any
    grad_norm: GradientNorm
    progress: Progress
    libraries: str  # what computes matrix products and attention
    clock: Clock
    checkpoints: CheckpointWriter
    uploader: Uploader | None  # --upload_checkpoints
    sinks: Sinks
    timer: SectionTimer
    stop: StopRequests


def all_ranks_build_run(
    settings: Settings,
    datasets: Datasets,
    rank_info: RankInfo,
    device: torch.device,
    stop: StopRequests,
    began: float,
    note: Callable[[str, int], None],
) -> Run:
    """Build everything that training needs.

    `began`: when the process started, by time.monotonic(). `note` is called with what begins, and the step.
    """
    is_writing = rank_info.is_main and not settings.flags.training.dry_run
    note("choosing a checkpoint", 0)
    remote, uploader = build_uploads(settings)
    checkpoints = CheckpointWriter(settings.saved_models, None if uploader is None else uploader.offer)
    fresh = first_state(settings, rank_info, datasets)
    with all_ranks_lock_resume_point(resume_request(settings, remote), checkpoints, fresh) as point:
        model, fresh, libraries = all_ranks_prepare_model(settings, datasets, rank_info, device, point, fresh, note)
        note("building the engine", 0)
        engine = put_in_engine(model, settings)
        note("loading the checkpoint", 0)
        state = all_ranks_resume(engine, rank_info, fresh, point)
        progress = Progress(all_ranks_count_lost_time(state, settings))
    if point is not None and point.is_own and is_writing:
        checkpoints.repair_pointers(point.path.name, progress.state)
        if uploader is not None:
            uploader.offer(point.path.name)  # unless the store has it
    means = collectives.all_ranks_read(datasets.tokens_per_row)
    clock = build_clock(settings, rank_info.world_size, datasets, means, progress, began)
    torch.manual_seed(seed_of("rank", progress.state.seed, progress.state.samples, rank_info.rank))
    return Run(
        settings=settings,
        rank_info=rank_info,
        device=device,
        datasets=datasets,
        resume_point=point,
        engine=engine,
        grad_norm=GradientNorm(engine),
        progress=progress,
        libraries=libraries,
        clock=clock,
        checkpoints=checkpoints,
        uploader=uploader,
        sinks=Sinks(
            settings.runs,
            is_writing,
            progress.step,
            progress.samples,
            detach_monitor(engine),
            num_ranks=rank_info.world_size,
            with_details=settings.flags.training.log_details,
        ),
        timer=SectionTimer(device, lambda section: note(section, progress.step)),
        stop=stop,
    )


def all_ranks_prepare_model(
    settings: Settings,
    datasets: Datasets,
    rank_info: RankInfo,
    device: torch.device,
    point: ResumePoint | None,
    fresh: TrainingState,
    note: Callable[[str, int], None],
) -> tuple[PreTrainingModel, TrainingState, str]:
    """The model that the engine gets, `fresh` with the libraries that were chosen, and a text about them."""
    note("preparing the model", 0)
    torch.manual_seed(settings.flags.training.seed)
    model = build_model(settings.model_config, settings.flags.model, settings.recomputed_layers)
    if point is not None and point.is_only_weights:  # --finetune
        model.load_state_dict(read_weights(point.path))
    elif point is None and settings.first_weights is not None:  # --use_pretrain
        load_hugging_face_weights(model, settings.first_weights, settings.tokenizer)
    note("choosing the libraries of matrix products", 0)
    with torch.random.fork_rng(devices=[]):  # after everything that can be refused, because it writes a file
        fresh, libraries = all_ranks_choose_libraries(fresh, point, settings, device)
    note("preparing the weights", 0)
    if point is None and settings.first_weights is None:
        all_ranks_start_from_data(model, datasets)
    replace_blocks(model, settings, rank_info.rank)
    return model, fresh, libraries


def retention_of(flags: CheckpointFlags) -> Retention:
    return Retention(flags.keep_last, flags.keep_every)


def build_uploads(settings: Settings) -> tuple[RemoteCheckpoints | None, Uploader | None]:
    url = settings.flags.checkpoints.upload_checkpoints
    if url is None or settings.flags.training.dry_run:
        return None, None
    remote = RemoteCheckpoints(url, settings.job_name)
    return remote, Uploader(remote, settings.saved_models, retention_of(settings.flags.checkpoints))


def resume_request(settings: Settings, remote: RemoteCheckpoints | None) -> ResumeRequest:
    has_end = settings.time_budget is None and not settings.flags.training.rewarmup
    return ResumeRequest(
        other=settings.flags.checkpoints.load_training_checkpoint,
        other_tag=settings.flags.checkpoints.load_checkpoint_id,
        is_only_weights=settings.flags.model.finetune,
        is_dry_run=settings.flags.training.dry_run,
        remote=remote,
        schedule_end=settings.training.total_training_steps if has_end else None,
    )


def build_model(config: BertConfig, flags: ModelFlags, recomputed_layers: int | None) -> PreTrainingModel:
    """`recomputed_layers` are recomputed together: 0 for the default number, None for no gradient checkpointing."""
    model = (BertForPreTrainingPreLN if flags.preln else BertForPreTraining)(config)
    layers = default_chunk(config.num_hidden_layers) if recomputed_layers == 0 else recomputed_layers or 0
    model.set_checkpointing(
        Checkpointing(
            layers=layers,
            activation=flags.gelu_checkpoint,
            attention=flags.attention_dropout_checkpoint,
            norm=flags.normalize_invertible,
        )
    )
    return model


def all_ranks_start_from_data(model: PreTrainingModel, datasets: Datasets) -> None:
    """Set what the model JSON takes from the training data instead of random numbers."""
    config, data = model.config, datasets.training[0]
    if config.decoder_bias_init == "unigram":
        read = partial(log_frequencies, data, config.num_tokens)
        model.set_decoder_bias(torch.from_numpy(collectives.all_ranks_read(read)))
    if config.embedding_init == "cooccurrence":  # on one rank: the signs of singular vectors may depend on the machine
        vectors = partial(word_vectors, data, config.num_tokens, config.hidden_size)
        model.set_word_embeddings(torch.from_numpy(collectives.all_ranks_from_main(vectors)))


def replace_blocks(model: PreTrainingModel, settings: Settings, rank: int) -> None:
    """--deepspeed_transformer_kernel and --compile: compute the blocks in another way, with the same weights."""
    flags = settings.flags.model
    if flags.deepspeed_transformer_kernel:
        factory = layer_factory(
            settings.model_config,
            micro_batch=max(length.micro for length in settings.lengths),
            is_fp16=settings.precision == "fp16",
            seed=seed_of("kernel", settings.flags.training.seed, rank) % 2**31,
            pre_layer_norm=flags.preln,
            normalize_invertible=flags.normalize_invertible,
            gelu_checkpoint=flags.gelu_checkpoint,
            attn_dropout_checkpoint=flags.attention_dropout_checkpoint,
            stochastic_mode=flags.stochastic_mode,
        )
        use_kernel(model, factory)
    if flags.compile:
        compile_blocks(model)


def put_in_engine(model: PreTrainingModel, settings: Settings) -> Any:
    config = settings.deepspeed.for_engine(settings.precision, has_monitors=not settings.flags.training.dry_run)
    optimizer, groups = build_optimizer(
        model,
        config.get("optimizer"),
        learning_rate=settings.training.learning_rate,
        weight_decay=settings.training.weight_decay,
        zero=config.get("zero_optimization", {}),
    )
    engine = build_engine(model, config, optimizer, groups)
    set_rate_factors(engine.optimizer.param_groups, config.get("optimizer"), settings.training.learning_rate)
    return engine


def first_state(settings: Settings, rank_info: RankInfo, datasets: Datasets) -> TrainingState:
    """The state of a new run, which skips what `skips.json` lists."""
    skips = read_skips(settings.saved_models)
    return TrainingState(
        step=0,
        start_step=0,
        samples=0,
        tokens=0,
        seed=settings.flags.training.seed,
        world_size=rank_info.world_size,
        zero_stage=settings.deepspeed.zero_stage,
        precision=settings.precision,
        data_digest=datasets.digest,
        tokenizer_digest=settings.tokenizer.digest if settings.tokenizer else datasets.training[0].tokenizer_digest,
        best_validation_loss=None,
        model_config=settings.model_config.to_dict(),
        is_preln=settings.flags.model.preln,
        recipe=settings.recipe(),
        is_kernel=settings.flags.model.deepspeed_transformer_kernel,
        data_summary=datasets.summary,
        skips=skips.ranges,
        rollbacks=skips.rollbacks,
    )


def all_ranks_resume(
    engine: Any, rank_info: RankInfo, fresh: TrainingState, point: ResumePoint | None
) -> TrainingState:
    """Load `point` into the engine, and return the state to continue with: `fresh` for a new run."""
    if point is None or point.is_only_weights:
        return fresh
    saved = read_state(point.path)
    all_ranks_load_engine(engine, point.path, saved, rank_info.world_size)
    if not point.is_own:
        return replace(fresh, step=saved.step, start_step=saved.step)
    before, now = saved.recipe or {}, fresh.recipe or {}
    for key in before:
        if key in now and before[key] != now[key]:
            console.say(f"changed since {point.path.name}: {key} was {before[key]!r}, is {now[key]!r}")
    # Either may lack a range: skips.json cannot be written on a full disk, and the checkpoint may be from before it.
    skips = Skips(saved.skips, saved.rollbacks).merged(read_skips(point.path.parent))
    best = point.best or Best(point.path.name)
    losses = [loss for loss in (saved.best_validation_loss, best.mlm_loss) if loss is not None]
    values = [saved.best_probe, best.value if best.probe == saved.probe_name else None]
    return replace(
        saved,
        world_size=rank_info.world_size,
        recipe=fresh.recipe,
        skips=skips.ranges,
        rollbacks=skips.rollbacks,
        best_validation_loss=min(losses, default=None),
        best_probe=max((value for value in values if value is not None), default=None),
        data_summary=fresh.data_summary,
        processor=fresh.processor,
        cpu_libraries=fresh.cpu_libraries,
    )

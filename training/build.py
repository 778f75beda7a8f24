"""A run, put together: data, model, engine, schedule, checkpoints and sinks, resumed where it was."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.console import console
from common.errors import UserError
from common.words import counted
from data.shards.dataset import PretrainingDataset
from data.stream.loader import TrainingStream
from nvidia.attention.backends import cuda_capability
from nvidia.checkpointing import Checkpointing, default_chunk
from nvidia.compiling import compile_blocks
from nvidia.interop.hugging_face import export_obstacles
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from training.checkpoints.match import ResumePoint, find_changes
from training.checkpoints.paths import TIME_SPENT
from training.checkpoints.reshard import load_for_other_ranks
from training.checkpoints.resume import ResumeRequest, locked_resume_point
from training.checkpoints.state import TrainingState, note_time_spent, read_state, read_time_spent
from training.checkpoints.writer import CheckpointWriter
from training.engine.build import build_engine, seed_of
from training.engine.kernel import layer_factory, use_kernel
from training.export.hugging_face import load_hugging_face_weights, read_weights
from training.faults.skips import Skips, read_skips
from training.inputs.datasets import Datasets, describe_rows
from training.inputs.streams import build_stream
from training.metrics.formatting import format_seconds
from training.metrics.sinks import Sinks
from training.optimizers.build import build_optimizer
from training.plan.horizon import Horizon
from training.plan.learning_rate import Schedule
from training.plan.outlook import Outlook, find_attention_notes, find_notes, format_count, look_ahead, mean_tokens
from training.plan.step_plan import Phase, StepPlan, plan_steps
from training.plan.time_budget import Budget
from training.runtime import collectives
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests
from training.settings.resolve import Settings, describe

NO_END = 2**62


@dataclass
class Run:
    """Everything the loop works with. `state` is the only part that changes from step to step."""

    settings: Settings
    rank_info: RankInfo
    device: torch.device
    engine: Any
    training: tuple[PretrainingDataset, ...]  # one for each length
    stream: TrainingStream
    plan: StepPlan
    validation: PretrainingDataset | None
    validation_length: int
    schedule: Schedule
    horizon: Horizon
    checkpoints: CheckpointWriter
    sinks: Sinks
    budget: Budget
    state: TrainingState
    stop: StopRequests

    def schedule_position(self) -> float:
        """Where the schedule is, in its steps: by those taken, or by the share of a time budget that is over."""
        if self.budget.total is None:
            return self.state.step
        return self.schedule.origin + self.budget.progress(self.state.seconds) * self.schedule.total_steps


def build_run(
    settings: Settings,
    datasets: Datasets,
    rank_info: RankInfo,
    device: torch.device,
    stop: StopRequests,
    began: float,
    note: Callable[[str], None],
) -> Run:
    """`began`: when the process did, by time.monotonic(). `note` is told what is being done."""
    training = datasets.training
    note("choosing a checkpoint")
    checkpoints = CheckpointWriter(settings.saved_models)
    fresh = first_state(settings, rank_info, datasets)
    with locked_resume_point(resume_request(settings), checkpoints, fresh) as origin:
        note("preparing the model")
        torch.manual_seed(settings.flags.seed)
        model = build_model(settings)
        load_first_weights(model, settings, origin)
        replace_blocks(model, settings, rank_info)
        note("building the engine")
        engine = put_in_engine(model, settings)
        note("loading the checkpoint")
        state = count_lost_time(resume(engine, rank_info, fresh, origin), settings)
    if origin is not None and origin.is_own and rank_info.is_main and not settings.flags.dry_run:
        checkpoints.repair_pointers(origin.tag, state)
    schedule = settings.schedule(state.start_step if settings.flags.rewarmup else 0)
    plan = build_plan(settings, rank_info, training)
    run = Run(
        settings=settings,
        rank_info=rank_info,
        device=device,
        engine=engine,
        training=training,
        stream=build_stream(settings, rank_info, training, plan.at(state.samples)),
        plan=plan,
        validation=datasets.validation,
        validation_length=datasets.validation_length,
        schedule=schedule,
        horizon=build_horizon(settings, schedule, state, plan),
        checkpoints=checkpoints,
        sinks=Sinks(settings.runs, rank_info.is_main and not settings.flags.dry_run, state, engine.monitor),
        budget=build_budget(settings, state, began),
        state=state,
        stop=stop,
    )
    introduce(run, model, origin)
    # Nothing that trains draws from the global generator; what else might, should differ between ranks.
    torch.manual_seed(seed_of("rank", state.seed, state.samples, rank_info.rank))
    return run


def resume_request(settings: Settings) -> ResumeRequest:
    flags = settings.flags
    has_end = settings.time_budget is None and not flags.rewarmup
    return ResumeRequest(
        other=flags.load_training_checkpoint,
        other_tag=flags.load_checkpoint_id,
        is_only_weights=flags.finetune,
        is_dry_run=flags.dry_run,
        schedule_end=settings.training.total_training_steps if has_end else None,
    )


def build_model(settings: Settings) -> PreTrainingModel:
    flags = settings.flags
    model_class = BertForPreTrainingPreLN if flags.preln else BertForPreTraining
    model = model_class(settings.model_config)
    layers = flags.gradient_checkpointing
    model.set_checkpointing(
        Checkpointing(
            layers=default_chunk(settings.model_config.num_hidden_layers) if layers == 0 else layers or 0,
            activation=flags.gelu_checkpoint,
            attention=flags.attention_dropout_checkpoint,
            norm=flags.normalize_invertible,
        )
    )
    return model


def load_first_weights(model: PreTrainingModel, settings: Settings, origin: ResumePoint | None) -> None:
    """--use_pretrain: begin from a Hugging Face folder's weights; --finetune: from those of another run."""
    if origin is None and settings.first_weights is not None:
        load_hugging_face_weights(model, settings.first_weights, settings.tokenizer)
    if origin is not None and origin.is_only_weights:
        model.load_state_dict(read_weights(origin.path))


def replace_blocks(model: PreTrainingModel, settings: Settings, rank_info: RankInfo) -> None:
    """--deepspeed_transformer_kernel and --compile: other ways to compute the blocks, with the weights they have."""
    flags = settings.flags
    if flags.deepspeed_transformer_kernel:
        factory = layer_factory(
            settings.model_config,
            flags,
            micro_batch=max(length.micro for length in settings.lengths),
            precision=settings.precision,
            seed=seed_of("kernel", flags.seed, rank_info.rank) % 2**31,
        )
        use_kernel(model, factory)
    if flags.compile:
        compile_blocks(model)


def put_in_engine(model: PreTrainingModel, settings: Settings) -> Any:
    config = settings.deepspeed.for_engine(settings.precision, has_monitors=not settings.flags.dry_run)
    optimizer, groups = build_optimizer(
        model,
        config.get("optimizer"),
        learning_rate=settings.training.learning_rate,
        weight_decay=settings.training.weight_decay,
        zero=config.get("zero_optimization", {}),
    )
    return build_engine(model, config, optimizer, groups)


def first_state(settings: Settings, rank_info: RankInfo, datasets: Datasets) -> TrainingState:
    """The state of a run that has not begun."""
    return TrainingState(
        step=0,
        start_step=0,
        samples=0,
        tokens=0,
        seed=settings.flags.seed,
        world_size=rank_info.world_size,
        zero_stage=settings.deepspeed.zero_stage,
        precision=settings.precision,
        data_digest=datasets.digest,
        tokenizer_digest=settings.tokenizer.digest if settings.tokenizer else datasets.training[0].tokenizer_digest,
        best_validation_loss=None,
        model_config=settings.model_config.to_dict(),
        is_preln=settings.flags.preln,
        recipe=settings.recipe(),
        is_kernel=settings.flags.deepspeed_transformer_kernel,
        data_summary=datasets.summary,
    )


def resume(engine: Any, rank_info: RankInfo, fresh: TrainingState, origin: ResumePoint | None) -> TrainingState:
    """Load `origin` into the engine, and the state to go on with."""
    if origin is None or origin.is_only_weights:
        return fresh
    saved = read_state(origin.path)
    load_engine(engine, origin, saved, rank_info)
    if origin.is_own:
        for change in find_changes(saved.recipe or {}, fresh.recipe or {}):
            console.say(f"changed since {origin.tag}: {change}")
        # Either may lack one: a full disk takes no note, and a checkpoint from before a rollback has none of it.
        skips = Skips(saved.skips, saved.rollbacks).merged(read_skips(origin.folder))
        losses = [loss for loss in (saved.best_validation_loss, origin.best_loss) if loss is not None]
        return replace(
            saved,
            world_size=rank_info.world_size,
            recipe=fresh.recipe,
            skips=skips.ranges,
            rollbacks=skips.rollbacks,
            best_validation_loss=min(losses, default=None),
            data_summary=fresh.data_summary,
        )
    return replace(fresh, step=saved.step, start_step=saved.step)


def count_lost_time(state: TrainingState, settings: Settings) -> TrainingState:
    """`state` with the time that a process of this run took after its last checkpoint, before it was killed.

    Where that would leave no time at all, it was killed at the very end: what it lost is trained again, so that the
    schedule comes to its end.
    """
    if settings.time_budget is None:
        return state
    spent = collectives.all_ranks_from_main(lambda: read_time_spent(settings.saved_models))
    counted = replace(state, seconds=max(state.seconds, spent))
    if not is_time_over(settings, counted) or is_time_over(settings, state):
        return counted
    if state.step == state.start_step:
        raise UserError(
            f"--time_budget {settings.flags.time_budget}: earlier starts of this run have used it up "
            f"({format_seconds(spent)}) without saving a checkpoint; raise it and save more often "
            f"(--save_every_minutes), or remove {settings.saved_models / TIME_SPENT} to begin anew"
        )
    console.say(
        f"note: --time_budget {settings.flags.time_budget} was used up by a process that was killed before it saved "
        f"its last steps; what came after step {state.step} ({format_seconds(spent - state.seconds)}) is trained again"
    )
    return state


def is_time_over(settings: Settings, state: TrainingState) -> bool:
    return build_budget(settings, state, None).is_over(state.seconds, 0.0)


def load_engine(engine: Any, origin: ResumePoint, saved: TrainingState, rank_info: RankInfo) -> None:
    """Weights, optimizer state and counters, whatever the number of ranks that saved them."""
    options = optimizer_options(engine)
    if saved.world_size != rank_info.world_size and engine.zero_optimization():
        console.say(
            f"{origin.path}: saved by {counted(saved.world_size, 'rank')}, resharded for {rank_info.world_size}"
        )
        load_for_other_ranks(engine, origin.path)
    else:
        found, _ = engine.load_checkpoint(str(origin.folder), tag=origin.tag, load_lr_scheduler_states=False)
        if found is None:
            raise UserError(f"{origin.path}: DeepSpeed finds no files of its own there; use another checkpoint")
    set_optimizer_options(engine, options)


def optimizer_options(engine: Any) -> list[dict[str, Any]]:
    """What the DeepSpeed JSON says of each group (decay, betas …), which a load would replace by what was saved."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in engine.optimizer.param_groups
    ]


def set_optimizer_options(engine: Any, options: list[dict[str, Any]]) -> None:
    for group, values in zip(engine.optimizer.param_groups, options, strict=True):
        group.update(values)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()


def build_plan(settings: Settings, rank_info: RankInfo, training: tuple[PretrainingDataset, ...]) -> StepPlan:
    phases = [
        (each.tokens, Phase(index, each.length, each.micro, data.num_rows, mean_tokens(data)))
        for index, (each, data) in enumerate(zip(settings.lengths, training, strict=True))
    ]
    accumulation = settings.deepspeed.batch.accumulation
    return plan_steps(phases, settings.batch_schedule, accumulation=accumulation, world_size=rank_info.world_size)


def build_horizon(settings: Settings, schedule: Schedule, state: TrainingState, plan: StepPlan) -> Horizon:
    return Horizon(
        plan=plan,
        num_epochs=settings.training.num_epochs,
        # With a time budget the clock ends the run, and the schedule's steps are shares of its time.
        total_steps=settings.training.total_training_steps if settings.time_budget is None else NO_END,
        schedule_origin=schedule.origin,
        start_step=state.start_step,
        max_steps=settings.flags.max_steps,
        max_steps_per_epoch=settings.flags.max_steps_per_epoch,
    )


def build_budget(settings: Settings, state: TrainingState, began: float | None) -> Budget:
    return Budget(
        settings.time_budget,
        used_before=state.seconds,
        began=began,
        longest_pause=state.longest_pause,
        num_last_pauses=2 if settings.flags.export_dir is None else 3,
    )


def keep_time(run: Run) -> None:
    """Note the time used so far: rank 0's clock counts."""
    if run.budget.total is not None and run.rank_info.is_main and not run.settings.flags.dry_run:
        note_time_spent(run.checkpoints.folder, run.budget.used())


def is_run_finished(settings: Settings, rank_info: RankInfo, datasets: Datasets, state: TrainingState) -> bool:
    """Whether a run that was saved with `state` has come to its end."""
    schedule = settings.schedule(state.start_step if settings.flags.rewarmup else 0)
    horizon = build_horizon(settings, schedule, state, build_plan(settings, rank_info, datasets.training))
    seconds = max(state.seconds, read_time_spent(settings.saved_models))
    budget = build_budget(settings, state, None)
    return horizon.is_finished(state.step, state.samples) or budget.is_over(seconds, 0.0)


def introduce(run: Run, model: PreTrainingModel, origin: ResumePoint | None) -> None:
    """Say what is about to be trained, on the console and in TensorBoard."""
    settings, batch, horizon = run.settings, run.settings.deepspeed.batch, run.horizon
    config = settings.model_config
    layout = "pre-LN" if settings.flags.preln else "post-LN"
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    outlook = look_ahead(horizon, run.state.step, run.state.samples)
    facts = {
        "model": f"{layout}, {config.num_hidden_layers} layers of {config.hidden_size}, {config.num_tokens:,} tokens, "
        f"{parameters:,} parameters",
        "batch": f"{batch.total} rows of {settings.flags.max_seq_length}: {batch.micro} × {batch.accumulation} "
        f"micro-steps × {counted(run.rank_info.world_size, 'rank')}"
        + (f", then {settings.flags.batch_schedule}" if settings.flags.batch_schedule else ""),
        "data": describe_data(run) + f", about {format_count(outlook.data_tokens)} tokens",
        "validation": "none" if run.validation is None else describe_rows(run.validation, run.validation_length),
        "length": describe_length(run, outlook),
        "engine": f"{settings.precision}, ZeRO stage {settings.deepspeed.zero_stage}, {run.device.type}, "
        f"{counted(torch.get_num_threads(), 'thread')} a rank",
        "rate": f"{settings.flags.lr_schedule}, peak {settings.training.learning_rate:g}"
        + (f", over {settings.flags.time_budget}" if settings.flags.time_budget else ""),
        "checkpoints": str(settings.saved_models),
        "logs": str(settings.runs),
        "start": describe_start(settings, origin),
    }
    console.say(describe(settings.job_name, facts))
    for note in find_notes(
        horizon,
        run.schedule,
        num_parameters=parameters,
        output_dir=settings.flags.output_dir,
        has_validation=run.validation is not None,
    ):
        console.say(f"note: {note}")
    for obstacle in export_obstacles(config, settings.flags.preln):
        console.say(f"note: the model cannot be exported to transformers: {obstacle}")
    if not settings.flags.deepspeed_transformer_kernel:  # which has kernels and dropout of its own
        for note in find_attention_notes(config, settings.precision, run.device.type, cuda_capability(run.device)):
            console.say(f"note: {note}")
    for name, text in settings.sources.items():
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        run.sinks.text(name, f"```json\n{shown}\n```")


def describe_start(settings: Settings, origin: ResumePoint | None) -> str:
    if origin is not None:
        return f"from {'the weights of ' if origin.is_only_weights else ''}{origin.path}"
    return "from new weights" if settings.first_weights is None else f"from the weights of {settings.first_weights}"


def describe_length(run: Run, outlook: Outlook) -> str:
    """How far the run goes. With a time budget the steps are a bound, and the clock decides."""
    to_go = f"{outlook.epochs_left:.2f} epochs, about {format_count(outlook.tokens_left)} tokens to go"
    if run.budget.total is None:
        return f"to step {run.horizon.last_step():,}: {to_go}"
    return (
        f"{format_seconds(run.budget.total)} in all, {format_seconds(run.budget.left())} of training to go; at most to "
        f"step {run.horizon.last_step():,}: {to_go}"
    )


def describe_data(run: Run) -> str:
    """Each phase's data, and after how many rows of the run it is read."""
    return ", ".join(
        (f"then from row {phase.first_sample:,} of the run on " if phase.first_sample else "")
        + describe_rows(run.training[phase.index], phase.length)
        for phase in run.plan.phases
    )

"""A checkpoint loaded into a DeepSpeed engine, whatever the number of ranks that saved it."""

from typing import Any

from common.console import console
from common.errors import UserError
from common.words import counted
from training.checkpoints.match import ResumePoint
from training.checkpoints.reshard import load_for_other_ranks
from training.checkpoints.state import TrainingState
from training.engine.gradients import enable_overflow_checks


def all_ranks_load_engine(engine: Any, point: ResumePoint, saved: TrainingState, world_size: int) -> None:
    """Load weights, optimizer state and counters. The optimizer's options stay those of the DeepSpeed JSON."""
    options = _optimizer_options(engine)
    if saved.world_size != world_size and engine.zero_optimization():
        console.say(f"{point.path}: saved by {counted(saved.world_size, 'rank')}, resharded for {world_size}")
        load_for_other_ranks(engine, point.path)
    else:
        found, _ = engine.load_checkpoint(str(point.folder), tag=point.tag, load_lr_scheduler_states=False)
        if found is None:
            raise UserError(f"{point.path}: DeepSpeed finds none of its files there. Use another checkpoint")
    _set_optimizer_options(engine, options)
    enable_overflow_checks(engine)  # a load replaces the loss scaler


def _optimizer_options(engine: Any) -> list[dict[str, Any]]:
    """The options of each parameter group (weight decay, betas …), which a load would replace by the saved ones."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in engine.optimizer.param_groups
    ]


def _set_optimizer_options(engine: Any, options: list[dict[str, Any]]) -> None:
    for group, values in zip(engine.optimizer.param_groups, options, strict=True):
        group.update(values)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()

"""The DeepSpeed engine: built around our model and optimizer, and stepped."""

import glob
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from data.randomness import seed_of
from data.shards.schema import NO_LABEL
from data.stream.batches import Batch
from data.stream.loader import StepBatches
from training.engine.checkpoint_files import CheckedFiles
from training.metrics.tally import Tally
from training.metrics.timing import SectionTimer
from training.plan.step_plan import Segment
from training.runtime import collectives


def build_engine(
    model: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None, groups: list[dict[str, Any]]
) -> Any:
    """`optimizer` None: DeepSpeed builds the one its config names, on the same groups."""
    config = {key: value for key, value in config.items() if key != "optimizer" or optimizer is None}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer is not None else groups,
        config=config,
        dist_init_required=False,
    )
    engine.checkpoint_engine = CheckedFiles()
    # It copies a script beside the checkpoints, on rank 0 alone: on a full disk the others would wait for it for ever.
    engine._copy_recovery_script = lambda _path: None
    find_files = engine._get_all_ckpt_names
    # It looks for files by a pattern, in which a folder's own [ * ? would count.
    engine._get_all_ckpt_names = lambda folder, tag: find_files(glob.escape(folder), tag)
    return engine


def set_batch(engine: Any, segment: Segment) -> None:
    """Between two steps: tell the engine the rows of those to come, from which it knows where one ends."""
    engine.set_train_micro_batch_size(segment.phase.micro)
    engine.set_train_batch_size(segment.rows)
    # A step ends where this counter is a multiple of the micro-steps: with another number of them it must begin anew,
    # or the first step would end early and every later one would mix two steps' rows.
    engine.micro_steps = 0
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # ZeRO's own copy, which offloading reads
        engine.optimizer.gradient_accumulation_steps = segment.accumulation


def take_step(
    engine: Any,
    step: StepBatches,
    tally: Tally,
    phases: SectionTimer,
    seed: int,
    device: torch.device,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """One optimizer step: every micro-batch forward and backward, the engine knows the boundary.

    `should_stop` is asked between micro-steps, with the same answer on every rank; False when it made an end of the
    step. Nothing has been applied then, and the engine is only good for a checkpoint.
    """
    batches = [to_device(batch, device) for batch in step.micro_batches]
    phases.begin("meeting the other ranks")
    masked_total, sentence_total = all_ranks_labels_per_micro_step(batches, engine.world_size)
    for index, batch in enumerate(batches):
        if index > 0 and should_stop is not None and should_stop():
            return False
        # Dropout is a function of the data's position, so a resumed run repeats it without any saved random state.
        torch.manual_seed(seed_of("dropout", seed, step.next_sample, index, engine.global_rank))
        with phases.measure("forward"):
            loss = engine(batch, masked_lm_total=masked_total, next_sentence_total=sentence_total)
            loss = spoil_unless_finite(loss)
            tally.add(engine.module.details)
        with phases.measure("backward"):
            engine.backward(loss)
        with phases.measure("optimizer"):
            engine.step()
    return True


def spoil_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """The same loss; one that is infinite or not a number gives such gradients too, so that no rank takes the step.

    A gradient can be finite all the same: that of an infinite cross entropy is. Never waits for the device.
    """
    one = torch.ones_like(loss)
    return loss * torch.where(loss.detach().isfinite(), one, one * torch.nan)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(field.to(device, non_blocking=True) for field in batch))


def all_ranks_labels_per_micro_step(batches: list[Batch], world_size: int) -> torch.Tensor:
    """[masked tokens, labelled sentence pairs] of the global batch, each divided by its number of micro-steps.

    As divisors of the summed losses of a micro-step they make the gradient that of the global means, however unevenly
    labels are spread over ranks and micro-batches.
    """
    counts = [
        torch.stack([(batch.masked_lm_labels != NO_LABEL).sum(), (batch.next_sentence_label != NO_LABEL).sum()])
        for batch in batches
    ]
    return collectives.all_ranks_sum(torch.stack(counts).sum(0).double()) / (len(batches) * world_size)

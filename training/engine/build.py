"""The DeepSpeed engine: built around our model and optimizer, and one optimizer step of it."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from data.randomness import seed_of
from data.shards.schema import NO_LABEL
from data.stream.batches import Batch
from data.stream.loader import StepBatches
from nvidia.unpadding import KnownTokens, find_tokens
from training.engine.checkpoint_files import CheckedFiles
from training.engine.gradients import enable_overflow_checks
from training.metrics.timing import SectionTimer
from training.metrics.window import Tally
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
    # DeepSpeed copies a script beside the checkpoints, on rank 0 only: with a full disk the others would wait forever.
    engine._copy_recovery_script = lambda _path: None
    find_files = engine._get_all_ckpt_names
    # DeepSpeed finds files by a glob pattern, in which [ * ? of the folder's own name would be special.
    engine._get_all_ckpt_names = lambda folder, tag: find_files(glob.escape(folder), tag)
    enable_overflow_checks(engine)
    return engine


def detach_monitor(engine: Any) -> Any | None:
    """The engine's monitor (CSV, W&B, Comet …) for our figures, or None; the engine itself no longer writes to it.

    The engine would write the learning rate by samples. W&B drops values of a lower step than the last one, so beside
    that axis our figures, by steps, would be lost.
    """
    is_enabled, engine.monitor.enabled = engine.monitor.enabled, False
    return engine.monitor if is_enabled else None


def set_batch(engine: Any, segment: Segment) -> None:
    """Between two steps: set the rows of the following steps, from which the engine derives where a step ends."""
    engine.set_train_micro_batch_size(segment.phase.micro)
    engine.set_train_batch_size(segment.rows)
    # A step ends where this counter is a multiple of the micro-steps. When their number changes it must restart at 0:
    # otherwise the first step would end early, and every later one would mix the rows of two steps.
    engine.micro_steps = 0
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # ZeRO's own copy, which offloading reads
        engine.optimizer.gradient_accumulation_steps = segment.accumulation


def all_ranks_take_step(
    engine: Any, step: StepBatches, tally: Tally, timer: SectionTimer, seed: int, device: torch.device
) -> None:
    """Take one optimizer step: forward and backward of every micro-batch; the engine knows the last one."""
    inputs = [to_device(batch, device) for batch in step.micro_batches]
    timer.begin("waiting for other ranks")
    batches = [batch for batch, _ in inputs]
    masked_total, sentence_total = all_ranks_labels_per_micro_step(batches, engine.world_size)
    for index, (batch, tokens) in enumerate(inputs):
        # Dropout is a function of the data's position, so a resumed run repeats it without any saved random state.
        torch.manual_seed(seed_of("dropout", seed, step.next_sample, index, engine.global_rank))
        with timer.measure("forward"):
            loss = engine(batch, masked_lm_total=masked_total, next_sentence_total=sentence_total, tokens=tokens)
            loss = spoil_unless_finite(loss)
            tally.add(engine.module.details)
        with timer.measure("backward"):
            engine.backward(loss)
        with timer.measure("optimizer"):
            engine.step()


def spoil_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, whose gradients are NaN where it is not finite, so that no rank applies the step.

    The gradient of an infinite cross entropy would be finite. Never waits for the device.
    """
    one = torch.ones_like(loss)
    return loss * torch.where(loss.detach().isfinite(), one, one * torch.nan)


def to_device(batch: Batch, device: torch.device) -> tuple[Batch, KnownTokens | None]:
    """The batch on `device`, with what the host knows about its tokens; None on a CPU, which packs by length.

    Copies are asynchronous only from pinned memory. torch reuses that memory when the copy has ended.
    """
    if device.type == "cpu":
        return batch, None
    tokens = find_tokens(batch.input_mask, batch.masked_lm_labels != NO_LABEL)
    moved = [field.pin_memory().to(device, non_blocking=True) for field in (*batch, *tokens)]
    return Batch(*moved[: len(batch)]), KnownTokens(*moved[len(batch) :])


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


@contextmanager
def calling_parts_of(engine: Any) -> Iterator[None]:
    """Allow calls of the model's methods without the engine's forward pass.

    At ZeRO stage 3 a weight that a module reads from another one, as the joined projections of attention do, is
    gathered only while the tables of parameters are marked, which the engine does for its own forward passes.
    """
    is_partitioned = engine.zero_optimization_partition_weights()
    tables = [module._parameters for module in engine.module.modules()] if is_partitioned else []
    marked: list[Any] = [table for table in tables if hasattr(table, "_in_forward")]
    for table in marked:
        table._in_forward = True
    try:
        yield
    finally:
        for table in marked:
            table._in_forward = False

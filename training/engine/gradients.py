"""Gradients and updates: the norm, steps skipped because it is not finite, proof that every parameter is trained."""

from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.words import format_count
from training.runtime import collectives


class GradientNorm:
    """The norm of the gradient in the engine's last step, before clipping.

    With ZeRO or half precision the engine computes it. In fp32 at stage 0 it does not, so this class replaces the
    engine's clipping: one pass over the gradients for the norm, one to scale them. A norm that is not finite cancels
    the step, as it does in the other engines. The constructor installs a hook in the engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.own: Tensor | None = None
        # At stage 0 the fp16 wrapper around optimizers that are not DeepSpeed's returns the norm of scaled gradients.
        self.is_scaled = isinstance(engine.optimizer, FP16_UnfusedOptimizer)
        self.scale = 1.0
        if engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization():
            return
        if engine.gradient_clipping() > 0:
            engine.clip_fp32_gradients = self.clip
        else:
            engine.optimizer.register_step_pre_hook(self.clip)

    def note_scale(self) -> None:
        """Record the loss scale. Call before each step, which may change the scale."""
        if self.is_scaled:
            self.scale = float(self.engine.optimizer.loss_scale)

    @torch.no_grad()
    def clip(self, *_: Any) -> None:
        """Compute the norm of all gradients, and scale them. If it is not finite, drop them: nothing is updated."""
        parameters = list(self.engine.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.own = torch.stack(torch._foreach_norm(gradients)).norm()
        is_bad = not bool(self.own.isfinite())
        self.engine.optimizer.overflow = is_bad  # makes the engine count a skipped step
        if is_bad:
            for parameter in parameters:
                parameter.grad = None
        elif self.engine.gradient_clipping() > 0:
            factor = (self.engine.gradient_clipping() / (self.own + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)

    def value(self) -> float | None:
        """The norm; None before the first step and after a step that was skipped for an overflow."""
        norm = self.own if self.own is not None else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm) / self.scale


class GradientWatch:
    """Finds parameters that get no gradient in the first steps. Costs one reduction per parameter and micro-step.

    A head whose labels are all missing in one batch may have them in the next, so several steps are watched.
    """

    def __init__(self, model: nn.Module, num_steps: int) -> None:
        self.steps_left = num_steps
        self.largest: dict[str, Tensor] = {}
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.handles: list[RemovableHandle] = [parameter.register_hook(self._hook(name)) for name, parameter in trained]

    def _hook(self, name: str) -> Any:
        def keep_largest(gradient: Tensor) -> None:
            size = gradient.detach().abs().max().float()
            before = self.largest.get(name)
            self.largest[name] = size if before is None else torch.maximum(before, size)

        return keep_largest

    def end_step(self) -> list[str]:
        """After the last watched step: names of parameters whose gradients were all zero or missing; otherwise []."""
        self.steps_left -= 1
        if self.steps_left != 0:
            return []
        for handle in self.handles:
            handle.remove()
        return [name for name in self.names if name not in self.largest or float(self.largest[name]) == 0.0]


def enable_overflow_checks(engine: Any) -> None:
    """Make every kind of engine skip a step whose gradient is not finite, as those in half precision do by default.

    ZeRO in fp32 checks only if asked to; ZeRO in fp16 raises once the loss scale cannot fall further, before it counts
    the step. GradientNorm guards plain fp32. Call after the engine is built and after every load.
    """
    if hasattr(engine.optimizer, "check_grad_overflow"):
        engine.optimizer.check_grad_overflow = True
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False


def can_lower_loss_scale(engine: Any) -> bool:
    """Whether the loss scale is dynamic and above its minimum, so that skipped steps are part of finding it."""
    if not engine.fp16_enabled():
        return False
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)  # at stage 0; ZeRO has a scaler
    if config is not None:
        is_dynamic, minimum = config.dynamic_loss_scale, config.min_loss_scale
    else:
        is_dynamic, minimum = optimizer.loss_scaler.dynamic, getattr(optimizer.loss_scaler, "min_scale", 1.0)
    return bool(is_dynamic) and float(optimizer.loss_scale) > float(minimum)


def inner_optimizer(engine: Any) -> Any:
    """The optimizer inside the wrappers for ZeRO and half precision."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def describe_muon(engine: Any) -> str | None:
    """How many matrices are orthogonalised and what becomes of the other parameters; None without Muon."""
    groups = [group for group in inner_optimizer(engine).param_groups if "use_muon" in group]
    if not groups:
        return None
    # ZeRO replaces the parameters of a group by flat partitions; DeepSpeed's own Muon marks the parameters.
    own = {id(p) for group in groups if group["use_muon"] for p in group["params"]}
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if getattr(p, "use_muon", id(p) in own)]
    sizes = [sum(getattr(p, "ds_numel", p.numel()) for p in part) for part in (parameters, matrices)]
    noun = "matrix" if len(matrices) == 1 else "matrices"
    return (
        f"Muon orthogonalises {len(matrices)} {noun} with {format_count(sizes[1])} parameters, AdamW updates the other "
        f"{format_count(sizes[0] - sizes[1])}"
    )


class MovementWatch:
    """Compares every parameter group before and after the first applied step whose learning rate is not zero.

    It compares the weights that the optimizer updates: with ZeRO or half precision the fp32 ones, as a small update
    can be lost in the rounding of half precision.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.before: list[float] | None = None
        self.is_done = False

    def before_step(self, lr: float) -> None:
        """Note the weights, unless a step was watched before or they are not in memory (NVMe)."""
        is_watched = not self.is_done and lr != 0 and all(weights.numel() for _, weights in self._weights())
        self.before = self._sums() if is_watched else None

    def all_ranks_after_step(self, is_applied: bool) -> list[str]:
        """A warning for each group that did not move on any rank; [] except after the one step that is watched."""
        if self.before is None or not is_applied:
            return []
        self.is_done = True
        has_moved = [before != after for before, after in zip(self.before, self._sums(), strict=True)]
        # With ZeRO, a rank's part of a small group may be nothing but padding.
        has_moved = collectives.all_ranks_any(*has_moved)
        groups = inner_optimizer(self.engine).param_groups
        return [
            describe_unmoved(index, group)
            for index, group in enumerate(groups)
            if group["lr"] > 0 and not has_moved[index]
        ]

    def _sums(self) -> list[float]:
        """The sum of this rank's weights of each group, in fp64."""
        groups = inner_optimizer(self.engine).param_groups
        sums = [0.0] * len(groups)
        for index, tensor in self._weights():
            sums[index] += float(tensor.detach().sum(dtype=torch.float64))
        return sums

    def _weights(self) -> list[tuple[int, torch.Tensor]]:
        """(number of the group, weights)"""
        wrapper = self.engine.optimizer
        if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO stage 3 fills the groups only during a step
            group_of = wrapper.sub_group_to_group_id
            return [(group_of[number], part) for number, part in enumerate(wrapper.fp32_partitioned_groups_flat)]
        groups = inner_optimizer(self.engine).param_groups
        return [(index, weights) for index, group in enumerate(groups) for weights in group["params"]]


def describe_unmoved(index: int, group: dict[str, Any]) -> str:
    kind = {True: "Muon's matrices", False: "updated by AdamW", None: "of the optimizer"}[group.get("use_muon")]
    return (
        f"the optimizer did not change any weight of its parameter group {index} ({kind}, weight decay "
        f"{group.get('weight_decay', 0.0):g}, learning rate {group['lr']:.1e}) in the first step: these weights are "
        f"not trained. Check the optimizer and zero_optimization in the DeepSpeed JSON"
    )

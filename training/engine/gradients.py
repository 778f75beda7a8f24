"""Gradients: their norm at every ZeRO stage, steps skipped because they are not finite, parameters that get none."""

from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


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

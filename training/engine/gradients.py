"""Gradients as they are: their norm at every ZeRO stage, and parameters that get none."""

from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class GradientNorm:
    """The gradient's norm before clipping, of the engine's last step.

    With ZeRO or half precision the engine keeps it. In fp32 at stage 0 it does not, so its clipping is done here
    instead: one pass over the gradients for the norm, one to scale them. A norm that is not finite cancels the step,
    as it does in the other engines.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.own: Tensor | None = None
        # At stage 0 the fp16 wrapper around other optimizers than its own keeps the norm of the scaled gradients.
        self.is_scaled = isinstance(engine.optimizer, FP16_UnfusedOptimizer)
        self.scale = 1.0
        is_plain = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
        if not is_plain:
            return
        if engine.gradient_clipping() > 0:
            engine.clip_fp32_gradients = self.clip
        else:
            engine.optimizer.register_step_pre_hook(self._before_step)

    def note_scale(self) -> None:
        """Before a step, because the step may change the scale."""
        if self.is_scaled:
            self.scale = float(self.engine.optimizer.loss_scale)

    def _before_step(self, *_: Any) -> None:
        self.measure()
        self._drop_if_not_finite()

    def _drop_if_not_finite(self) -> bool:
        """Without gradients the optimizer leaves everything as it is; `overflow` tells the engine to count a skip."""
        assert self.own is not None
        is_bad = not bool(self.own.isfinite())
        self.engine.optimizer.overflow = is_bad
        if is_bad:
            for parameter in self.engine.module.parameters():
                parameter.grad = None
        return is_bad

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """Take the norm of the gradients there are, which are returned."""
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        self.own = torch.stack(torch._foreach_norm(gradients)).norm()
        return gradients

    @torch.no_grad()
    def clip(self) -> None:
        gradients = self.measure()
        assert self.own is not None
        if self._drop_if_not_finite():
            return
        factor = (self.engine.gradient_clipping() / (self.own + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)

    def value(self) -> float | None:
        """The norm, or None before the first step and after one that was skipped for an overflow."""
        norm = self.own if self.own is not None else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm) / self.scale


class GradientWatch:
    """Which parameters got a gradient other than zero in the steps watched. Costs one reduction a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.largest: dict[str, Tensor] = {}
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.handles: list[RemovableHandle] = [
            parameter.register_hook(self._note(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _note(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            size = gradient.detach().abs().max().float()
            before = self.largest.get(name)
            self.largest[name] = size if before is None else torch.maximum(before, size)

        return note

    def finish(self) -> list[str]:
        """Stop watching; the names of parameters that got no gradient, or only zeros."""
        for handle in self.handles:
            handle.remove()
        return [name for name in self.names if name not in self.largest or float(self.largest[name]) == 0.0]

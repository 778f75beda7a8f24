"""LAMB: Adam's direction, with each parameter's step scaled by the ratio of its norm to its update's norm.

Plain torch, so it runs on CPUs and GPUs. It needs whole parameters: under ZeRO the norms would be those of flat
partitions, so check_optimizer() refuses that combination.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "bias_correction": True,
    "use_trust_ratio": True,
}


class Lamb(torch.optim.Optimizer):
    """r = m̂ / (√v̂ + ε) + λ·w, then w ← w - lr · ratio · r, with ratio = ‖w‖ / ‖r‖ clamped to the two coefficients.

    The ratio is 1 if the norm of the parameter or of its update is zero. Without `bias_correction`, m̂ and v̂ are the
    plain running means. Without `use_trust_ratio` this is AdamW; torch has none without bias correction.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, DEFAULTS | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # nobody passes a closure
        for group in self.param_groups:
            self._update_group(group)

    def _update_group(self, group: dict[str, Any]) -> None:
        by_age: dict[int, list[Tensor]] = {}  # parameters without a gradient are not updated
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_age.setdefault(self._age(parameter), []).append(parameter)
        for age, parameters in by_age.items():
            self._update(group, parameters, age)

    def _age(self, parameter: Tensor) -> int:
        """Count this step; the number of updates of the parameter, this one included."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = int(state["step"]) + 1
        return state["step"]

    def _update(self, group: dict[str, Any], parameters: list[Tensor], age: int) -> None:
        first, second = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means = [self.state[parameter]["exp_avg"] for parameter in parameters]
        squares = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1.0 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - second)
        mean_scale = 1.0 / (1.0 - first**age) if group["bias_correction"] else 1.0
        square_scale = 1.0 / (1.0 - second**age) if group["bias_correction"] else 1.0
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_mul_(divisors, square_scale**0.5)
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, divisors)
        torch._foreach_mul_(updates, mean_scale)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["use_trust_ratio"]:
            torch._foreach_mul_(updates, list(trust_ratios(group, parameters, updates).unbind()))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def trust_ratios(group: dict[str, Any], parameters: list[Tensor], updates: tuple[Tensor, ...]) -> Tensor:
    """‖w‖ / ‖r‖ of each parameter, clamped to the coefficients; 1 if either norm is zero."""
    weights = torch.stack(torch._foreach_norm(parameters))
    steps = torch.stack(torch._foreach_norm(updates))
    ratios = (weights / steps).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weights > 0) & (steps > 0), ratios, torch.ones_like(ratios))

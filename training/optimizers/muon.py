"""Muon and AdamW: orthogonalised momentum for hidden matrices, AdamW for all other parameters.

It needs whole matrices, hence ZeRO stage 0; DeepSpeed's own Muon gathers partitioned ones. On CPUs the iteration runs
in fp32, because half precision is slow there.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Coefficients of a quintic iteration with a steep slope at zero, so five rounds are enough.
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
DEFAULTS = {
    "lr": 1e-3,
    "momentum": 0.95,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "use_muon": False,
}


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of each matrix in [N, R, C] near one (between about 0.7 and 1.2)."""
    a, b, c = QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        # x ← a·x + (b·gram + c·gram²)·x; the scaled sums are part of the products.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups with `use_muon` get Muon's update, the others AdamW's (torch's fused implementation).

    Muon's update is scaled to the typical size of AdamW's, so both use the same learning rate and weight decay.
    """

    def __init__(self, params: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(params, DEFAULTS | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # nobody passes a closure
        for group in self.param_groups:
            if group["use_muon"]:
                self._muon_step(group)
            else:
                self._adamw_step(group)

    def _muon_step(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        for shape, parameters in by_shape.items():
            momenta = [self._momentum(parameter) for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
            looked_ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates = orthogonalize(torch.stack(list(looked_ahead))).unbind()
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            # 0.2·√(longer side) scales the update's root mean square to the usual one of AdamW.
            torch._foreach_add_(parameters, updates, alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    def _adamw_step(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

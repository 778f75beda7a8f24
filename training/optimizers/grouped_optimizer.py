"""The base of our optimizers: a step updates each parameter group in turn."""

from collections.abc import Callable
from typing import Any

import torch


class GroupedOptimizer(torch.optim.Optimizer):
    """Subclasses implement `update_group`, which runs without gradient tracking."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group)
        return loss

    def update_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

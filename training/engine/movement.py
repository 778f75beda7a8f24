"""What the optimizer updates: the matrices that Muon orthogonalises, and the proof that every parameter group moves."""

from typing import Any

import torch

from common.words import format_count
from training.runtime import collectives


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

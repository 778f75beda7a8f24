"""Parameter groups, and the optimizer that the DeepSpeed JSON names."""

from typing import Any

import torch
from torch import nn

from common.errors import Problems, nearest
from training.muon import MuonWithAdamW

ADAM_KEYS = {"lr", "betas", "eps", "weight_decay"}
# Said by DeepSpeed configs to choose among its own implementations; ours has one.
ADAM_CHOICES = {"torch_adam", "adam_w_mode", "foreach", "fused", "bias_correction"}
MUON_KEYS = ADAM_KEYS | {"momentum", "muon_lr", "adam_lr"}


def parameter_groups(model: nn.Module, weight_decay: float, split_muon: bool = False) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: matrices decay, biases and LayerNorms do not.

    With `split_muon` the encoder's matrices stand apart, marked `use_muon`.
    """
    hidden, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif split_muon and ".encoder." in name:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": hidden, "weight_decay": weight_decay, "use_muon": True},
        {"params": matrices, "weight_decay": weight_decay, "use_muon": False},
        {"params": vectors, "weight_decay": 0.0, "use_muon": False},
    ]
    if not split_muon:
        for group in groups:
            group.pop("use_muon")
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, block: dict[str, Any] | None, *, learning_rate: float, weight_decay: float, zero: dict[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]]]:
    """The optimizer for deepspeed.initialize() and the groups it works on.

    None leaves the construction to DeepSpeed: for its CPU-offloaded Adam, for Muon on partitioned matrices, and for
    the kinds that only it has. Each group carries `rate_factor`, its rate relative to the schedule's.
    """
    block = block or {"type": "AdamW"}
    kind = block["type"].lower()
    params = dict(block.get("params", {}))
    weight_decay = params.get("weight_decay", weight_decay)
    stage = zero.get("stage", 0)
    is_muon = kind == "muon"
    groups = parameter_groups(model, weight_decay, split_muon=is_muon and stage == 0)
    for group in groups:
        group["rate_factor"] = 1.0
    if "offload_optimizer" in zero or kind not in ("adam", "adamw", "muon") or (is_muon and stage > 0):
        return None, groups
    _check_params(params, MUON_KEYS if is_muon else ADAM_KEYS | ADAM_CHOICES)
    if kind in ("adam", "adamw") and params.get("bias_correction") is False:
        return None, groups  # only DeepSpeed's fused kernel leaves the correction out
    if is_muon:
        base = params.get("lr", learning_rate)
        for group in groups:
            group["rate_factor"] = params.get("muon_lr" if group["use_muon"] else "adam_lr", base) / base
    common = {"lr": learning_rate, "betas": tuple(params.get("betas", (0.9, 0.999))), "eps": params.get("eps", 1e-8)}
    if is_muon:
        return MuonWithAdamW(groups, momentum=params.get("momentum", 0.95), **common), groups
    if kind == "adam" and params.get("adam_w_mode", True) is False:
        return torch.optim.Adam(groups, fused=True, **common), groups
    return torch.optim.AdamW(groups, fused=True, **common), groups


def _check_params(params: dict[str, Any], known: set[str]) -> None:
    problems = Problems()
    for key in params:
        if key not in known:
            problems.add(f"the DeepSpeed JSON's optimizer.params: unknown key {key!r}{nearest(key, known)}")
    problems.raise_if_any()


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)

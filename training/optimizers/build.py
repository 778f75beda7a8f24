"""Parameter groups, and the optimizer that the DeepSpeed JSON selects."""

from typing import Any

import torch
from torch import nn

from nvidia.encoder import BertEncoder
from training.optimizers.block import OUR_KINDS
from training.optimizers.lamb import Lamb
from training.optimizers.muon import MuonWithAdamW


def parameter_groups(model: nn.Module, weight_decay: float, split_muon: bool = False) -> list[dict[str, Any]]:
    """Groups with every trainable parameter once: weight decay for matrices, none for LayerNorms and biases.

    With `split_muon`, the matrices of the encoder's linear layers are a separate group, marked `use_muon`.
    """
    hidden_ids = {id(p) for p in hidden_matrices(model)} if split_muon else set()
    hidden, decayed, plain = [], [], []
    for parameter in model.parameters():  # a tied one comes once
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            plain.append(parameter)
        elif id(parameter) in hidden_ids:
            hidden.append(parameter)
        else:
            decayed.append(parameter)
    return [
        {"params": part, "weight_decay": decay, **({"use_muon": part is hidden} if split_muon else {})}
        for part, decay in ((hidden, weight_decay), (decayed, weight_decay), (plain, 0.0))
        if part
    ]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers inside the encoder, without embeddings: the parameters for Muon."""
    return [
        parameter
        for encoder in model.modules()
        if isinstance(encoder, BertEncoder)
        for module in encoder.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    ]


def build_optimizer(
    model: nn.Module, block: dict[str, Any] | None, *, learning_rate: float, weight_decay: float, zero: dict[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]]]:
    """The optimizer for deepspeed.initialize(), and its parameter groups. `block` has been checked.

    The optimizer is None if DeepSpeed has to build it: CPU-offloaded Adam, Muon on partitioned matrices, and the kinds
    that only DeepSpeed has. Each group's `rate_factor` is its learning rate relative to the schedule's.
    """
    block = block or {"type": "AdamW"}
    kind = block["type"].lower()
    params = dict(block.get("params", {}))
    weight_decay = params.get("weight_decay", weight_decay)
    stage = zero.get("stage", 0)
    groups = parameter_groups(model, weight_decay, split_muon=kind == "muon" and stage == 0)
    for group in groups:
        group["rate_factor"] = 1.0
    if "offload_optimizer" in zero or kind not in OUR_KINDS or (kind == "muon" and stage > 0):
        return None, groups
    common = {"lr": learning_rate, "betas": tuple(params.get("betas", (0.9, 0.999))), "eps": params.get("eps", 1e-8)}
    if kind == "muon":
        set_rate_factors(groups, block, learning_rate)
        return MuonWithAdamW(groups, momentum=params.get("momentum", 0.95), **common), groups
    is_corrected = params.get("bias_correction", True)
    if kind == "lamb":
        coefficients = {key: params[key] for key in ("max_coeff", "min_coeff") if key in params}
        return Lamb(groups, bias_correction=is_corrected, **coefficients, **common), groups
    if not is_corrected:
        return Lamb(groups, bias_correction=False, use_trust_ratio=False, **common), groups
    amsgrad = bool(params.get("amsgrad", False))
    if kind == "adam" and params.get("adam_w_mode", True) is False:
        return torch.optim.Adam(groups, fused=True, amsgrad=amsgrad, **common), groups
    return torch.optim.AdamW(groups, fused=True, amsgrad=amsgrad, **common), groups


def set_rate_factors(groups: list[dict[str, Any]], block: dict[str, Any] | None, learning_rate: float) -> None:
    """Set the `rate_factor` of groups marked `use_muon` or not from `muon_lr` and `adam_lr`.

    DeepSpeed's own Muon makes new groups, so this is also needed once its engine is built.
    """
    params = (block or {}).get("params", {})
    base = params.get("lr", learning_rate)
    for group in groups:
        if "use_muon" in group:
            group["rate_factor"] = params.get("muon_lr" if group["use_muon"] else "adam_lr", base) / base


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set every group's learning rate to `rate` times its `rate_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)

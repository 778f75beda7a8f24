"""The optimizer that the DeepSpeed JSON selects: its block, checked, and the optimizer with its parameter groups."""

from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import nn

from common.errors import Problems, nearest, shortened
from common.validation import validate
from nvidia.encoder import BertEncoder
from training.optimizers.lamb import Lamb
from training.optimizers.muon import MuonWithAdamW


def _check_betas(value: Any) -> Any:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value):
        raise ValueError(f"found {shortened(value)}, expected two numbers from 0 to below 1, such as [0.9, 0.999]")
    return value


Amount = Annotated[float, Field(ge=0, lt=1e300)]
Rate = Annotated[float, Field(gt=0, lt=1e300)]  # one of them divides the others
Betas = Annotated[list[float], BeforeValidator(_check_betas)]


class CommonParams(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lr: Rate = 1e-3
    betas: Betas = [0.9, 0.999]
    eps: Amount = 1e-8
    weight_decay: Amount = 0.01


class AdamParams(CommonParams):
    bias_correction: bool = True
    adam_w_mode: bool = True
    amsgrad: bool = False
    # These choose among implementations: the first if DeepSpeed builds the optimizer to offload it, the others never.
    torch_adam: bool = False
    foreach: bool = False
    fused: bool = False


class LambParams(CommonParams):
    bias_correction: bool = True
    max_coeff: Amount = 10.0
    min_coeff: Amount = 0.01


class MuonParams(CommonParams):
    momentum: Amount = 0.95
    muon_lr: Rate = 1e-3
    adam_lr: Rate = 1e-3


class OtherParams(AdamParams, LambParams, MuonParams):
    """The parameters of an optimizer that only DeepSpeed has; it may have other keys."""

    model_config = ConfigDict(extra="allow", strict=True)


class OptimizerBlock(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: Any = None


OUR_KINDS: dict[str, type[BaseModel]] = {
    "adam": AdamParams,
    "adamw": AdamParams,
    "lamb": LambParams,
    "muon": MuonParams,
}
# Built by DeepSpeed itself, on our parameter groups.
DEEPSPEED_KINDS = ("adagrad", "lion", "muadam", "muadamw", "musgd")
KINDS: dict[str, type[BaseModel]] = {**OUR_KINDS, **dict.fromkeys(DEEPSPEED_KINDS, OtherParams)}


def check_optimizer(block: dict[str, Any], zero: dict[str, Any], where: str, problems: Problems) -> None:
    """Add the problems of the optimizer block in the file `where`; `zero` is its zero_optimization block."""
    checked = validate(OptimizerBlock, block, where, problems, "optimizer")
    if checked is None:
        return
    kind, params = checked.type.lower(), checked.params
    if kind not in KINDS:
        problems.add(
            f"{where}: optimizer.type: found {checked.type!r}, expected one of {', '.join(KINDS)}{nearest(kind, KINDS)}"
        )
        return
    validate(KINDS[kind], params, where, problems, "optimizer.params")
    if kind == "lamb" and zero.get("stage", 0) != 0:
        problems.add(
            f"{where}: Lamb cannot be used with ZeRO stage {zero.get('stage')}: its trust ratios need the norm of each "
            f"whole parameter, but ZeRO partitions them; set zero_optimization.stage to 0, or use AdamW"
        )
    if kind == "muon" and zero.get("stage", 0) == 3 and zero.get("reduce_scatter", True) is not False:
        problems.add(
            f"{where}: Muon with ZeRO stage 3 needs whole gradients; set zero_optimization.reduce_scatter to false, or "
            f"use another stage"
        )
    offload = zero.get("offload_optimizer")
    is_offloaded = isinstance(offload, dict) and offload.get("device", "none") != "none"
    if kind == "muon" and (is_offloaded or zero.get("cpu_offload") is True):
        problems.add(
            f"{where}: Muon cannot be used with zero_optimization.offload_optimizer, where DeepSpeed 0.19.8 computes "
            f"wrong updates; remove offload_optimizer, or use AdamW"
        )
    if kind == "adam" and params.get("adam_w_mode", True) is False and params.get("bias_correction") is False:
        problems.add(
            f"{where}: Adam with both adam_w_mode and bias_correction false is not available; remove one of the two"
        )


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

"""Parameter groups, and the optimizer that the DeepSpeed JSON names."""

from typing import Any

import torch
from torch import nn

from common.errors import Problems, nearest, shortened
from nvidia.encoder import BertEncoder
from training.optimizers.lamb import Lamb
from training.optimizers.muon import MuonWithAdamW

ADAM_KEYS = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction"})
# Said by DeepSpeed configs to choose among its own implementations; ours has one.
ADAM_CHOICES = frozenset({"torch_adam", "adam_w_mode", "foreach", "fused", "amsgrad"})
KNOWN_PARAMS = {
    "adam": ADAM_KEYS | ADAM_CHOICES,
    "adamw": ADAM_KEYS | ADAM_CHOICES,
    "lamb": ADAM_KEYS | {"max_coeff", "min_coeff"},
    "muon": (ADAM_KEYS - {"bias_correction"}) | {"momentum", "muon_lr", "adam_lr"},
}
RATES = frozenset({"lr", "muon_lr", "adam_lr"})  # of which one divides the others
# Built by DeepSpeed itself, on the groups made here.
DEEPSPEED_KINDS = ("adagrad", "lion", "muadam", "muadamw", "musgd")


def parameter_groups(model: nn.Module, weight_decay: float, split_muon: bool = False) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: matrices decay, LayerNorms and biases do not.

    With `split_muon` the matrices of the encoder's linear layers stand apart, marked `use_muon`.
    """
    hidden_ids = {id(p) for p in hidden_matrices(model)} if split_muon else set()
    hidden, decayed, plain = [], [], []
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))  # a tied parameter belongs to several modules
            if parameter.ndim < 2:
                plain.append(parameter)
            elif id(parameter) in hidden_ids:
                hidden.append(parameter)
            else:
                decayed.append(parameter)
    groups = [
        {"params": hidden, "weight_decay": weight_decay, "use_muon": True},
        {"params": decayed, "weight_decay": weight_decay, "use_muon": False},
        {"params": plain, "weight_decay": 0.0, "use_muon": False},
    ]
    if not split_muon:
        for group in groups:
            group.pop("use_muon")
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers inside the encoder: what Muon is for. Embeddings are not among them."""
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
    """The optimizer for deepspeed.initialize() and the groups it works on. The block has been checked.

    None leaves the construction to DeepSpeed: for its CPU-offloaded Adam, for Muon on partitioned matrices, and for
    the kinds that only it has. Each group carries `rate_factor`, its rate relative to the schedule's.
    """
    block = block or {"type": "AdamW"}
    kind = block["type"].lower()
    params = dict(block.get("params", {}))
    weight_decay = params.get("weight_decay", weight_decay)
    stage = zero.get("stage", 0)
    groups = parameter_groups(model, weight_decay, split_muon=kind == "muon" and stage == 0)
    for group in groups:
        group["rate_factor"] = 1.0
    if "offload_optimizer" in zero or kind not in KNOWN_PARAMS or (kind == "muon" and stage > 0):
        return None, groups
    common = {"lr": learning_rate, "betas": tuple(params.get("betas", (0.9, 0.999))), "eps": params.get("eps", 1e-8)}
    if kind == "muon":
        base = params.get("lr", learning_rate)
        for group in groups:
            group["rate_factor"] = params.get("muon_lr" if group["use_muon"] else "adam_lr", base) / base
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


def check_optimizer(block: dict[str, Any], zero: dict[str, Any], where: str, problems: Problems) -> None:
    """Note what is wrong with the DeepSpeed JSON's optimizer block, of which `where` names the file."""
    for key in block:
        if key not in ("type", "params", "legacy_fusion"):
            hint = nearest(key, ("type", "params", "legacy_fusion"), otherwise="; expected type or params; remove it")
            problems.add(f"{where}: unknown key 'optimizer.{key}'{hint}")
    kind, params = block.get("type"), block.get("params", {})
    if not isinstance(kind, str):
        problems.add(f"{where}: optimizer.type must name an optimizer, but found {shortened(kind)}")
        return
    if not isinstance(params, dict):
        problems.add(f"{where}: optimizer.params must be an object {{…}}, but found {shortened(params)}")
        return
    known_kinds = (*KNOWN_PARAMS, *DEEPSPEED_KINDS)
    if kind.lower() not in known_kinds:
        problems.add(
            f"{where}: optimizer.type {kind!r} is none of {', '.join(known_kinds)}{nearest(kind.lower(), known_kinds)}"
        )
        return
    known = KNOWN_PARAMS.get(kind.lower())
    for key in params:
        if known is not None and key not in known:
            hint = nearest(key, known, otherwise=f"; expected one of {', '.join(known)}; remove it")
            problems.add(f"{where}: unknown key 'optimizer.params.{key}' for {kind}{hint}")
    _check_params(params, where, problems)
    _check_pairing(kind.lower(), params, zero, where, problems)


def _check_params(params: dict[str, Any], where: str, problems: Problems) -> None:
    for key, value in params.items():
        if key == "betas":
            is_pair = isinstance(value, list) and len(value) == 2
            if not is_pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in value):
                problems.add(
                    f"{where}: optimizer.params.{key}: found {shortened(value)}, expected two numbers from 0 to "
                    f"below 1, such as [0.9, 0.999]"
                )
        elif key in ("bias_correction", *ADAM_CHOICES):
            if not isinstance(value, bool):
                problems.add(f"{where}: optimizer.params.{key}: found {shortened(value)}, expected true or false")
        elif key in ADAM_KEYS | {"max_coeff", "min_coeff", "momentum", "muon_lr", "adam_lr"}:
            least = "above 0" if key in RATES else "of at least 0"
            if not _is_number(value) or value < 0 or (key in RATES and value == 0):
                problems.add(f"{where}: optimizer.params.{key}: found {shortened(value)}, expected a number {least}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _check_pairing(kind: str, params: dict[str, Any], zero: dict[str, Any], where: str, problems: Problems) -> None:
    if kind == "lamb" and zero.get("stage", 0) != 0:
        problems.add(
            f"{where}: Lamb with ZeRO stage {zero.get('stage')} would be wrong: its trust ratios need the norm of each "
            f"whole parameter, but ZeRO cuts them into flat pieces; set zero_optimization.stage to 0, or use AdamW"
        )
    if kind == "muon" and zero.get("stage", 0) == 3 and zero.get("reduce_scatter", True) is not False:
        problems.add(
            f"{where}: Muon with ZeRO stage 3 needs whole gradients; set zero_optimization.reduce_scatter to false, or "
            f"use another stage"
        )
    if kind == "adam" and params.get("adam_w_mode", True) is False and params.get("bias_correction") is False:
        problems.add(
            f"{where}: Adam with adam_w_mode false and bias_correction false is not available; leave out one of the two"
        )


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)

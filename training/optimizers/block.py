"""The DeepSpeed JSON's `optimizer` block: its keys, and combinations that do not work."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.errors import Problems, nearest, shortened
from common.validation import validate


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

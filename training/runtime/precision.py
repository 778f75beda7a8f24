"""The number type that a run computes in."""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.console import console
from common.errors import UserError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# How DeepSpeed's data_types block may write each precision.
SPELLINGS = {
    "fp32": ("fp32", "float32", "torch.float32", "float"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


@dataclass(frozen=True)
class Abilities:
    """The precisions that the accelerator supports. `name` is for messages."""

    name: str
    fp16: bool
    bf16: bool

    def can(self, precision: str) -> bool:
        return precision == "fp32" or bool(getattr(self, precision))


def find_abilities() -> Abilities:
    if torch.cuda.is_available():
        return Abilities(torch.cuda.get_device_name(), fp16=True, bf16=torch.cuda.is_bf16_supported())
    try:
        fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        fp16 = False
    return Abilities("CPU", fp16=fp16, bf16=True)


def choose_precision(flag: str, wanted: str, abilities: Abilities, config_path: Path) -> str:
    """The precision of the run: the flag's, or the JSON's if the machine supports it, else fp32 with a warning."""
    if flag != "auto":
        if not abilities.can(flag):
            raise UserError(
                f"--precision {flag}: this machine's accelerator ({abilities.name}) does not support {flag}; "
                f"expected one of {_listed(abilities)}; pass one of these"
            )
        return flag
    if abilities.can(wanted):
        return wanted
    console.warn(
        f"{config_path} requests {wanted}, but this machine's accelerator ({abilities.name}) supports only "
        f"{_listed(abilities)}; training in fp32. To silence this warning, pass --precision fp32 or a DeepSpeed JSON "
        f"such as configs/ds_cpu.json"
    )
    return "fp32"


def _listed(abilities: Abilities) -> str:
    return ", ".join(precision for precision in DTYPES if abilities.can(precision))

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
    precisions: tuple[str, ...]


def find_abilities() -> Abilities:
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported()
        return Abilities(torch.cuda.get_device_name(), ("fp32", "fp16", "bf16") if has_bf16 else ("fp32", "fp16"))
    try:
        has_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        has_fp16 = False
    return Abilities("CPU", ("fp32", "fp16", "bf16") if has_fp16 else ("fp32", "bf16"))


def choose_precision(flag: str, wanted: str, abilities: Abilities, config_path: Path) -> str:
    """The precision of the run: the flag's, or the JSON's if the machine supports it, else fp32 with a warning."""
    listed = ", ".join(abilities.precisions)
    if flag != "auto" and flag not in abilities.precisions:
        raise UserError(
            f"--precision {flag}: this machine's accelerator ({abilities.name}) does not support {flag}; expected one "
            f"of {listed}; pass one of these"
        )
    chosen = wanted if flag == "auto" else flag
    if chosen in abilities.precisions:
        return chosen
    console.warn(
        f"{config_path} requests {wanted}, but this machine's accelerator ({abilities.name}) supports only "
        f"{listed}; training in fp32. To silence this warning, pass --precision fp32 or a DeepSpeed JSON "
        f"such as configs/ds_cpu.json"
    )
    return "fp32"

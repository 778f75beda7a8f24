"""The number type a run computes in, and CPUs that report AMX but cannot execute it."""

import os
import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
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
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
# All of AVX-512 including fp16 arithmetic, but no AMX tiles.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
HALF_MATMUL = (sys.executable, "-c", "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x")


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


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The instruction sets that the CPU reports; empty on systems without /proc/cpuinfo."""
    if not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def avoid_broken_amx(
    environment: MutableMapping[str, str] = os.environ,
    cpu_flags: set[str] | None = None,
    probe: Sequence[str] = HALF_MATMUL,
) -> None:
    """Limit oneDNN's instruction set if executing AMX kills the process.

    Some virtual machines report AMX and raise SIGILL on its first use, so a child process tries it. Must run before
    this process's first matmul, which is when oneDNN reads the limit.
    """
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    if "amx_bf16" not in flags or ISA_LIMIT in environment:
        return
    if not dies_of_illegal_instruction(probe, environment):
        return
    environment[ISA_LIMIT] = ISA_WITHOUT_AMX
    if dies_of_illegal_instruction(probe, environment):
        raise UserError(
            f"this CPU reports amx_bf16, but half-precision matrix products fail with an illegal instruction, even "
            f"with {ISA_LIMIT}={ISA_WITHOUT_AMX}; set {ISA_LIMIT}=AVX2 and pass --precision fp32"
        )
    console.warn(
        f"this CPU reports AMX but cannot execute it; {ISA_LIMIT}={ISA_WITHOUT_AMX} is set for this run (set it in the "
        f"environment to silence this warning)"
    )


def dies_of_illegal_instruction(probe: Sequence[str], environment: MutableMapping[str, str]) -> bool:
    outcome = subprocess.run(probe, env=dict(environment), capture_output=True, timeout=120, check=False)
    return outcome.returncode == -signal.SIGILL

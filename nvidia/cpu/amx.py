"""CPUs that report AMX but cannot execute it."""

import os
import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from common.console import console
from common.errors import UserError

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
# All of AVX-512 including fp16 arithmetic, but no AMX tiles.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
HALF_MATMUL = (sys.executable, "-c", "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x")


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

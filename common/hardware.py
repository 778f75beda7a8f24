"""The machine: a line about it, and whether it has an accelerator. Imports nothing that takes time."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")


def choose_accelerator() -> None:
    """Set DS_ACCELERATOR=cpu if torch finds no accelerator, before DeepSpeed is imported and warns about it."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def describe_hardware(device: "torch.device", num_ranks: int) -> str:
    """`8 × NVIDIA A100-SXM4-80GB`, or the CPU with the number of its threads."""
    if device.type == "cuda":
        import torch

        return f"{num_ranks} × {torch.cuda.get_device_name(device)}"
    return f"{cpu_name()}, {os.cpu_count()} CPU threads, no GPU"


def cpu_name() -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""The machine, in one line."""

import os
import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def describe_hardware(device: torch.device, num_ranks: int) -> str:
    """`8 × NVIDIA A100-SXM4-80GB`, or the CPU with the number of its threads."""
    if device.type == "cuda":
        return f"{num_ranks} × {torch.cuda.get_device_name(device)}"
    return f"{cpu_name()}, {os.cpu_count()} CPU threads, no GPU"


def cpu_name() -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

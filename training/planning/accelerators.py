"""The table of accelerators, and the cluster that --gpus describes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError, closest, nearest, shortened
from common.json_files import load_json

TABLE = Path(__file__).with_name("accelerators.json")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
GIB = 2**30
MEASURED_HERE = "here"  # the name of an accelerator that is measured when the command runs

# Share of the published memory bandwidth that streaming kernels reach: 3.02 of 3.35 TB/s in a copy on an H100.
MEMORY_EFFICIENCY = 0.90
# Share of a link's published bandwidth that collectives of large messages reach in nccl-tests ("busbw").
LINK_EFFICIENCY = 0.80
INTRA_NODE_LATENCY = 5e-6  # seconds per hop
INTER_NODE_LATENCY = 15e-6
# Host seconds per kernel in eager PyTorch: the lower limit of a micro-step, however fast the accelerator is.
LAUNCH_SECONDS = 8e-6
# Memory that neither tensors nor buffers use: CUDA context, libraries and NCCL, and the allocator's fragmentation.
CONTEXT_GIB = 1.5
FRAGMENTATION = 0.04

_NUMBERS = ("memory_gib", "memory_tb_per_s", "efficiency", "intra_node_gb_per_s", "inter_node_gb_per_s")
_KEYS = (*_NUMBERS, "peak_tflops", "compute_capability", "efficiency_origin", "device")
_GPUS = re.compile(r"(?:(?P<per_node>\d+)(?:x(?P<nodes>\d+))?:)?(?P<name>[^:\s]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Accelerator:
    """One device. Links are per device and per direction, peaks are dense FLOP/s, all as published."""

    name: str
    memory_gib: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]  # by precision; one that is missing is not supported
    efficiency: float  # share of the peak that a model's products reach in training
    efficiency_origin: str
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    compute_capability: tuple[int, int] | None = None
    device: str = "cuda"
    is_measured: bool = False  # measured figures are what is achieved: no further efficiency applies

    def matmul_flops(self, precision: str) -> float:
        """FLOP/s that the products of a training step reach."""
        return self.peak_flops[precision] * (1.0 if self.is_measured else self.efficiency)

    @property
    def streaming_bytes_per_s(self) -> float:
        return self.memory_bytes_per_s * (1.0 if self.is_measured else MEMORY_EFFICIENCY)

    @property
    def link_efficiency(self) -> float:
        return 1.0 if self.is_measured else LINK_EFFICIENCY

    @property
    def launch_seconds(self) -> float:
        return 0.0 if self.device == "cpu" else LAUNCH_SECONDS

    @property
    def usable_gib(self) -> float:
        """What tensors can use."""
        if self.device == "cpu":
            return self.memory_gib
        return (self.memory_gib - CONTEXT_GIB) / (1 + FRAGMENTATION)


@dataclass(frozen=True)
class Cluster:
    accelerator: Accelerator
    gpus_per_node: int
    nodes: int = 1

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes


@dataclass(frozen=True)
class GpusText:
    """--gpus, read but not yet looked up."""

    name: str
    gpus_per_node: int
    nodes: int


def read_table(extra: Path | None = None) -> dict[str, Accelerator]:
    """The shipped table; the user's file replaces entries of the same name and adds the others."""
    table = _read_file(TABLE)
    return table if extra is None else {**table, **_read_file(extra)}


def parse_gpus(text: str) -> GpusText:
    """`8x128:H100` is 8 GPUs in each of 128 nodes, `8:H100` one node of 8, `H100` one GPU."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise UserError(
            f"--gpus {text!r}: expected GPUs per node, nodes and the accelerator, as in 8x128:H100 (8:H100 for "
            f"one node, H100 for one GPU)"
        )
    per_node, nodes = int(found["per_node"] or 1), int(found["nodes"] or 1)
    if per_node < 1 or nodes < 1 or per_node * nodes > 10**6:
        raise UserError(f"--gpus {text!r}: found {per_node} × {nodes} GPUs, expected 1 to 1,000,000 in all")
    return GpusText(found["name"], per_node, nodes)


def find_accelerator(name: str, table: Mapping[str, Accelerator]) -> Accelerator:
    """The accelerator of that name, in any case; `A100` alone is ambiguous, and the error lists both names."""
    by_lower = {known.lower(): accelerator for known, accelerator in table.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    known = ", ".join([*table, MEASURED_HERE])
    longer = [entry for entry in table if entry.lower().startswith(name.lower())]
    if len(longer) > 1:
        raise UserError(f"--gpus: {name!r} can be {' or '.join(longer)}; give the whole name")
    near = closest(name.lower(), [*by_lower, MEASURED_HERE])
    hint = f"; did you mean {by_lower[near].name if near in by_lower else near!r}?" if near is not None else ""
    raise UserError(
        f"--gpus: unknown accelerator {name!r}{hint} (known: {known}). Pass one of these, or add yours with "
        f"--accelerators FILE"
    )


def _read_file(path: Path) -> dict[str, Accelerator]:
    problems = Problems()
    content = load_json(path, "a table of accelerators")
    made = {name: problems.attempt(partial(_make, path, name, entry)) for name, entry in content.items()}
    problems.raise_if_any()
    return {name: accelerator for name, accelerator in made.items() if accelerator is not None}


def _make(path: Path, name: str, entry: Any) -> Accelerator:
    where = f"{path}: {name}"
    if not isinstance(entry, dict):
        raise UserError(f"{where}: found {shortened(entry)}, expected an object with {', '.join(_KEYS)}")
    problems = Problems()
    for key in entry:
        if key not in _KEYS:
            problems.add(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}")
    for key in _NUMBERS:
        if not _is_positive(entry.get(key)):
            problems.add(f"{where}: {key} is {shortened(entry.get(key))}, expected a number above 0")
    if _is_positive(entry.get("efficiency")) and entry["efficiency"] > 1:
        problems.add(f"{where}: efficiency is {entry['efficiency']}, expected a share of the peak from 0 to 1")
    peaks = entry.get("peak_tflops")
    if not isinstance(peaks, dict) or not peaks or not all(_is_positive(peak) for peak in peaks.values()):
        problems.add(f'{where}: peak_tflops is {shortened(peaks)}, expected dense TFLOP/s as in {{"bf16": 989}}')
    else:
        for key in [key for key in peaks if key not in PRECISIONS]:
            problems.add(f"{where}: peak_tflops has {key!r}, expected precisions among {', '.join(PRECISIONS)}")
    capability = entry.get("compute_capability")
    if capability is not None and not (
        isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability)
    ):
        problems.add(f"{where}: compute_capability is {shortened(capability)}, expected two numbers as in [9, 0]")
    if entry.get("device", "cuda") not in ("cuda", "cpu"):
        problems.add(f"{where}: device is {shortened(entry['device'])}, expected cuda (AMD's too) or cpu")
    problems.raise_if_any()
    assert isinstance(peaks, dict)
    return Accelerator(
        name=name,
        memory_gib=float(entry["memory_gib"]),
        memory_bytes_per_s=entry["memory_tb_per_s"] * 1e12,
        peak_flops={key: peak * 1e12 for key, peak in peaks.items()},
        efficiency=float(entry["efficiency"]),
        efficiency_origin=str(entry.get("efficiency_origin", path.name)),
        intra_node_bytes_per_s=entry["intra_node_gb_per_s"] * 1e9,
        inter_node_bytes_per_s=entry["inter_node_gb_per_s"] * 1e9,
        compute_capability=None if capability is None else (capability[0], capability[1]),
        device=entry.get("device", "cuda"),
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12

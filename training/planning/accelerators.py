"""The table of accelerators, and the cluster that --gpus describes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import Problems, UserError, nearest
from common.json_files import load_json
from common.validation import validate

TABLE = Path(__file__).with_name("accelerators.json")
GIB = 2**30
MEASURED_HERE = "here"  # the name of an accelerator that is measured when the command runs
INTRA_NODE_LATENCY = 5e-6  # seconds per hop
INTER_NODE_LATENCY = 15e-6
# Host seconds per kernel in eager PyTorch: the lower limit of a micro-step, however fast the accelerator is.
LAUNCH_SECONDS = 8e-6
# Memory that neither tensors nor buffers use: CUDA context, libraries and NCCL, and the allocator's fragmentation.
CONTEXT_GIB = 1.5
FRAGMENTATION = 0.04

Positive = Annotated[float, Field(gt=0, lt=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]
_GPUS = re.compile(r"(?:(?P<per_node>\d+)(?:x(?P<nodes>\d+))?:)?(?P<name>[^:\s]+)", re.IGNORECASE)


class Accelerator(BaseModel):
    """An entry of the table. Links are per device and per direction, peaks are dense, all as published."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = ""  # the entry's key
    memory_gib: Positive
    memory_tb_per_s: Positive
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16"], Positive] = Field(min_length=1)  # of those supported
    efficiency: Share  # of the peak that a model's products reach in training
    efficiency_origin: str = ""  # the file, where it does not say
    intra_node_gb_per_s: Positive
    inter_node_gb_per_s: Positive
    compute_capability: tuple[int, int] | None = Field(default=None, strict=False)  # JSON has lists
    device: Literal["cuda", "cpu"] = "cuda"  # AMD's are cuda, too
    # Of the published memory bandwidth that streaming kernels reach: 3.02 of 3.35 TB/s in a copy on an H100.
    memory_efficiency: Share = 0.90
    # Of a link's published bandwidth that collectives of large messages reach in nccl-tests ("busbw").
    link_efficiency: Share = 0.80

    def peak_flops(self, precision: str) -> float:
        return self.peak_tflops[precision] * 1e12  # type: ignore[index]

    def matmul_flops(self, precision: str) -> float:
        """FLOP/s that the products of a training step reach."""
        return self.peak_flops(precision) * self.efficiency

    @property
    def streaming_bytes_per_s(self) -> float:
        return self.memory_tb_per_s * 1e12 * self.memory_efficiency

    @property
    def intra_node_bytes_per_s(self) -> float:
        """What collectives reach."""
        return self.intra_node_gb_per_s * 1e9 * self.link_efficiency

    @property
    def inter_node_bytes_per_s(self) -> float:
        return self.inter_node_gb_per_s * 1e9 * self.link_efficiency

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


def read_table(extra: Path | None = None) -> dict[str, Accelerator]:
    """The shipped table; the user's file replaces entries of the same name and adds the others."""
    table, problems = {}, Problems()
    for path in (TABLE, *([] if extra is None else [extra])):
        for name, entry in load_json(path, "a table of accelerators").items():
            accelerator = validate(Accelerator, entry, f"{path}: {name}", problems, page="docs/planning.md")
            if accelerator is not None:
                origin = accelerator.efficiency_origin or path.name
                table[name] = accelerator.model_copy(update={"name": name, "efficiency_origin": origin})
    problems.raise_if_any()
    return table


def parse_gpus(text: str) -> tuple[str, int, int]:
    """Name, GPUs per node and nodes: `8x128:H100`; `8:H100` is one node of 8, `H100` one GPU."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise UserError(
            f"--gpus {text!r}: expected GPUs per node, nodes and the accelerator, as in 8x128:H100 (8:H100 for "
            f"one node, H100 for one GPU)"
        )
    per_node, nodes = int(found["per_node"] or 1), int(found["nodes"] or 1)
    if per_node < 1 or nodes < 1 or per_node * nodes > 10**6:
        raise UserError(f"--gpus {text!r}: found {per_node} × {nodes} GPUs, expected 1 to 1,000,000 in all")
    return found["name"], per_node, nodes


def find_accelerator(name: str, table: Mapping[str, Accelerator]) -> Accelerator:
    """The accelerator of that name, in any case; `A100` alone is ambiguous, and the error lists both names."""
    longer = [entry for entry in table if entry.lower().startswith(name.lower())]
    for entry in longer:
        if entry.lower() == name.lower():
            return table[entry]
    if len(longer) > 1:
        raise UserError(f"--gpus: {name!r} can be {' or '.join(longer)}; give the whole name")
    known = [*table, MEASURED_HERE]
    raise UserError(
        f"--gpus: unknown accelerator {name!r}{nearest(name.upper(), known)} (known: {', '.join(known)}). Pass one of "
        f"these, or add yours with --accelerators FILE"
    )

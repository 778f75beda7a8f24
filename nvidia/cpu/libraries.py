"""The library that computes each kind of matrix product, and the attention backend that `auto` means on CPUs.

Which is fastest depends on the processor, so a run measures it (nvidia/fastest.py) and sets it with `use`. The results
differ in their last bits. Without a measurement torch's own library, MKL on x86, computes everything.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from common.errors import UserError
from nvidia.cpu import openblas, team

Library = Literal["torch", "onednn", "openblas"]
General = Literal["torch", "openblas"]  # for products of any size
VARIABLE = "CPU_PRODUCTS"
MEASURED = "measured"


@dataclass(frozen=True)
class Libraries:
    """The library of each product of a linear layer, and the attention backend with and without dropout. `others`: for
    the products that oneDNN does not compute."""

    forward: Library = "torch"
    input_gradient: Library = "torch"
    weight_gradient: Library = "torch"
    narrow_weight_gradient: Library = "torch"  # of a weight with few rows
    others: General = "torch"
    attention_with_dropout: Literal["grouped", "sdpa"] = "grouped"
    attention_without_dropout: Literal["grouped", "sdpa"] = field(default_factory=lambda: _faster_without_dropout())

    def attention(self, dropout_prob: float) -> str:
        return self.attention_with_dropout if dropout_prob else self.attention_without_dropout


def _faster_without_dropout() -> Literal["grouped", "sdpa"]:
    """`grouped`, unless it would use one thread where sdpa uses several."""
    return "grouped" if torch.get_num_threads() == 1 or team.is_available() else "sdpa"


_in_use = Libraries()


def in_use() -> Libraries:
    """The choice of this process."""
    return _in_use


def use(libraries: Libraries) -> None:
    """Set the choice of this process."""
    global _in_use
    _in_use = libraries


def forced_libraries(environment: Mapping[str, str] = os.environ) -> Libraries | None:
    """The libraries if the environment variable CPU_PRODUCTS names one; None: they are to be measured."""
    value = environment.get(VARIABLE, MEASURED)
    if value == "torch":
        return Libraries()
    if value == "onednn" and torch.backends.mkldnn.is_available():
        return _only("onednn")
    if value == "openblas" and openblas.kernels() is not None:
        return replace(_only("openblas"), others="openblas")
    if value == MEASURED:
        return None
    raise UserError(
        f"environment variable {VARIABLE}: found {value!r}, expected {MEASURED!r}, 'torch' or, where they can be "
        f"used, 'onednn' or 'openblas'. Unset it to use the fastest"
    )


def _only(library: Library) -> Libraries:
    return Libraries(library, library, library, library)


def describe_processor() -> str:
    """The kind of this processor: equal where the same libraries choose the same instructions."""
    features = {key: value for key, value in torch.cpu.get_capabilities().items() if not key.startswith("num_")}
    limits = os.environ.get("ONEDNN_MAX_CPU_ISA", ""), openblas.kernels()
    digest = hashlib.sha256(json.dumps([features, *limits], sort_keys=True).encode()).hexdigest()
    name = features.get("cpu_name") or features.get("architecture", "unknown")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, features {digest[:8]}"

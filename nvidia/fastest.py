"""The fastest libraries for a model on this processor, measured on its own shapes when a run starts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from nvidia.activations import is_gated
from nvidia.attention.measuring import time_attention
from nvidia.attention.registry import AUTO
from nvidia.config import BertConfig
from nvidia.cpu.libraries import General, Libraries, Library
from nvidia.cpu.linear import Role
from nvidia.cpu.measuring import Clock, Shape, time_products

MASKED_SHARE = 0.15  # of tokens, which the prediction head reads
WORDS = {"input_gradient": "input gradients", "weight_gradient": "weight gradients",
         "narrow_weight_gradient": "narrow weights' gradients"}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The libraries to use, and the seconds that each candidate took, by what was measured."""

    libraries: Libraries
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def describe(self) -> str:
        """`forward onednn (1.12 × torch), …`"""
        parts = []
        for kind, times in self.seconds.items():
            first, second = sorted(times, key=times.__getitem__)[:2]
            parts.append(f"{WORDS.get(kind, kind)} {first} ({times[second] / times[first]:.2f} × {second})")
        return ", ".join(parts)


def describe_libraries(libraries: Libraries) -> str:
    """`forward onednn, input gradients torch, …`"""
    parts = [f"{WORDS.get(role, role)} {getattr(libraries, role)}" for role in get_args(Role)]
    backends = f"{libraries.attention_with_dropout} with dropout, {libraries.attention_without_dropout} without"
    return ", ".join([*parts, f"attention {backends}"])


def measure_libraries(
    config: BertConfig, rows: int, length: int, dtype: torch.dtype = torch.float32, clock: Clock = time.thread_time
) -> Measured:
    """Time every candidate on the products and the attention of a micro-batch of `rows` × `length` tokens.

    Products and attention below a fixed size, and all in half precision, follow a fixed rule and are not measured.
    """
    if dtype != torch.float32:  # torch itself uses oneDNN for these
        return Measured(Libraries())
    products = _time_all_products(config, rows * length, clock)
    seconds: dict[str, dict[str, float]] = {
        role: {str(library): spent for library, spent in times.items()} for role, times in products.items()
    }
    chosen = Libraries(**{role: _fastest(times) for role, times in products.items()})  # type: ignore[arg-type]
    general = {name: sum(times.get(name, 0.0) for times in products.values()) for name in get_args(General)}
    if 0 < general["openblas"] < general["torch"]:
        chosen = replace(chosen, others="openblas")
    is_dense = not (config.is_relative or config.is_sparse)
    if config.attention_backend == AUTO and is_dense:
        dropout_prob = config.attention_probs_dropout_prob
        times = time_attention(rows, length, config.num_attention_heads, config.head_size, dropout_prob, clock)
        if times:
            seconds["attention"] = times
            kind = "attention_with_dropout" if dropout_prob else "attention_without_dropout"
            chosen = replace(chosen, **{kind: min(times, key=times.__getitem__)})  # type: ignore[arg-type]
    return Measured(chosen, seconds)


def _fastest(times: Mapping[Library, float]) -> Library:
    return min(times, key=times.__getitem__)


def _time_all_products(config: BertConfig, num_tokens: int, clock: Clock) -> dict[Role, dict[Library, float]]:
    """The products of a block, or of the prediction head if those of a block are small."""
    head = [(config.vocab_size, config.hidden_size)]
    of_blocks = time_products(block_shapes(config), num_tokens, clock)
    return of_blocks or time_products(head, round(MASKED_SHARE * num_tokens), clock)


def block_shapes(config: BertConfig) -> list[Shape]:
    """The weights [O, I] of a block."""
    hidden, wide = config.hidden_size, config.intermediate_size
    return [(3 * hidden, hidden), (hidden, hidden), (wide * (1 + is_gated(config.hidden_act)), hidden), (hidden, wide)]

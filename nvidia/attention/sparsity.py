"""Block-sparse attention: which blocks of keys each block of queries sees (`sparse_attention` in the DeepSpeed JSON).

A heads, N blocks of a sequence. A layout is bool [A or 1, N, N]: row = block of queries, column = block of keys.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from common.errors import Problems, UserError, nearest

# The parameters of each mode and their defaults
_COMMON: dict[str, Any] = {"block": 16, "different_layout_per_head": False}
_MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "fixed": {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    },
    "variable": {
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
    },
    "bigbird": {
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "bidirectional",
    },
    "bslongformer": {
        "num_sliding_window_blocks": 3,
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "attention": "bidirectional",
    },
}
_RANDOM_SEED = 0  # random blocks are equal on all ranks and in every run
_MIN = {"block": 1, "num_local_blocks": 1, "num_sliding_window_blocks": 1, "num_different_global_patterns": 1}


@dataclass(frozen=True)
class SparseAttention:
    """A validated `sparse_attention` block: the mode and its parameters with defaults filled in.

    The block in DeepSpeed's documentation has the keys of all modes at once. Those of other modes are validated and
    dropped; `ignored_keys` returns them.
    """

    mode: str
    parameters: Mapping[str, Any]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SparseAttention":
        mode = mapping.get("mode", "fixed")
        if not isinstance(mode, str) or mode not in _MODES:
            raise UserError(
                f"sparse_attention: mode is {mode!r}, expected one of {', '.join(_MODES)}{nearest(str(mode), _MODES)}"
            )
        known = _COMMON | {key: default for defaults in _MODES.values() for key, default in defaults.items()}
        problems = Problems()
        for key, value in mapping.items():
            if key in known:
                _check_parameter(key, value, problems)
            elif key != "mode":
                hint = nearest(key, known, otherwise="; expected one of those in docs/configuration.md; remove it")
                problems.add(f"sparse_attention: unknown key {key!r}, which no mode has{hint}")
        problems.raise_if_any()
        parameters = {key: mapping.get(key, default) for key, default in (_COMMON | _MODES[mode]).items()}
        _check_relations(parameters, problems)
        problems.raise_if_any()
        return cls(mode, parameters)

    def ignored_keys(self, mapping: Mapping[str, Any]) -> list[str]:
        """The keys of a block that have no effect because they belong to other modes."""
        return sorted(mapping.keys() - self.parameters.keys() - {"mode"})

    @property
    def is_causal(self) -> bool:
        """Whether a token sees no token after it."""
        return bool(self.parameters.get("attention") == "unidirectional")

    def to_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, **self.parameters}

    def __getitem__(self, key: str) -> Any:
        return self.parameters[key]

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


def _check_parameter(key: str, value: Any, problems: Problems) -> None:
    if key == "attention":
        if value not in ("unidirectional", "bidirectional"):
            problems.add(f"sparse_attention: attention is {value!r}, expected unidirectional or bidirectional")
    elif key in ("different_layout_per_head", "horizontal_global_attention"):
        if type(value) is not bool:
            problems.add(f"sparse_attention: {key} is {value!r}, expected true or false")
    elif key in ("local_window_blocks", "global_block_indices", "global_block_end_indices"):
        is_list = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
        if not (is_list or (key == "global_block_end_indices" and value is None)):
            problems.add(f"sparse_attention: {key} is {value!r}, expected a list of whole numbers from 0 up")
    elif type(value) is not int or value < _MIN.get(key, 0):
        problems.add(f"sparse_attention: {key} is {value!r}, expected a whole number from {_MIN.get(key, 0)} up")


def _check_relations(parameters: Mapping[str, Any], problems: Problems) -> None:
    """Parameters that are each valid but do not fit together."""
    unidirectional = parameters.get("attention") == "unidirectional"
    if unidirectional and parameters.get("horizontal_global_attention"):
        problems.add("sparse_attention: horizontal_global_attention needs attention: bidirectional")
    local, wide = parameters.get("num_local_blocks"), parameters.get("num_global_blocks")
    if local is not None and wide is not None:
        if local % max(wide, 1) or wide < 1:
            problems.add(f"sparse_attention: num_global_blocks ({wide}) must divide num_local_blocks ({local})")
        elif (patterns := parameters["num_different_global_patterns"]) > local // wide:
            problems.add(
                f"sparse_attention: num_different_global_patterns ({patterns}) is greater than num_local_blocks / "
                f"num_global_blocks ({local // wide})"
            )
        elif patterns > 1 and not parameters["different_layout_per_head"]:
            problems.add(
                "sparse_attention: num_different_global_patterns above 1 needs different_layout_per_head: true"
            )
    starts, ends = parameters.get("global_block_indices"), parameters.get("global_block_end_indices")
    if ends is not None and (
        len(ends) != len(starts or []) or any(a >= b for a, b in zip(starts or [], ends, strict=True))
    ):
        problems.add(
            f"sparse_attention: global_block_end_indices is {ends}, expected for each of global_block_indices {starts} "
            "a greater index"
        )


@lru_cache(maxsize=64)
def make_layout(sparse: SparseAttention, num_heads: int, length: int) -> Tensor:
    """The layout for sequences of up to `length` tokens, [A, N, N], or [1, N, N] if all heads share one.

    All layers of a model use the same layouts, so results are cached; they must not be modified.
    """
    num_blocks = -(-length // sparse["block"])
    heads = num_heads if sparse["different_layout_per_head"] else 1
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    build = {
        "dense": _dense,
        "fixed": _fixed,
        "variable": _variable,
        "bigbird": _bigbird,
        "bslongformer": _bslongformer,
    }[sparse.mode]
    layout = torch.stack([build(sparse, head, num_blocks, generator) for head in range(heads)])
    return layout.tril() if sparse.is_causal else layout


@dataclass(frozen=True)
class SparseHeads:
    """The sparse layout of one layer, of which heads may have been pruned."""

    sparse: SparseAttention
    num_heads: int  # before pruning
    kept: tuple[int, ...]  # indices of the heads that were kept

    @property
    def block_size(self) -> int:
        return int(self.sparse["block"])

    @property
    def is_causal(self) -> bool:
        return self.sparse.is_causal

    def blocks(self, length: int) -> Tensor:
        """Which blocks of keys a block of queries sees in sequences of up to `length` tokens, [A or 1, N, N]."""
        layout = make_layout(self.sparse, self.num_heads, length)
        return layout[list(self.kept)] if len(layout) > 1 else layout

    def visible_keys(self, length: int) -> Tensor:
        """The layout by token, bool [A or 1, S, S]; within a block, too, a causal layout hides later tokens."""
        tokens = self.blocks(length).repeat_interleave(self.block_size, 1).repeat_interleave(self.block_size, 2)
        visible = tokens[:, :length, :length]
        return visible.tril() if self.is_causal else visible


def _dense(sparse: SparseAttention, head: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool)


def _fixed(sparse: SparseAttention, head: int, size: int, generator: torch.Generator) -> Tensor:
    """Windows that see themselves; some blocks of each window, counted from its end, are global."""
    window, wide = sparse["num_local_blocks"], sparse["num_global_blocks"]
    layout = _windows([window], size)
    first = window - (1 + head % sparse["num_different_global_patterns"]) * wide
    for start in range(0, size, window):
        begin = start + first if start + window <= size else min(start + first, size - wide)
        _add_global(layout, max(begin, 0), begin + wide, sparse["horizontal_global_attention"])
    return layout


def _variable(sparse: SparseAttention, head: int, size: int, generator: torch.Generator) -> Tensor:
    """Windows of given sizes (the last repeats), global blocks, and random blocks."""
    layout = _windows(sparse["local_window_blocks"], size)
    for start, stop in _global_ranges(sparse, size):
        _add_global(layout, start, stop, sparse["horizontal_global_attention"])
    _add_random(layout, sparse, generator)
    return layout


def _bigbird(sparse: SparseAttention, head: int, size: int, generator: torch.Generator) -> Tensor:
    """A sliding window, the first blocks as global ones in both directions, and random blocks."""
    layout = _sliding_window(sparse["num_sliding_window_blocks"], size)
    _add_global(layout, 0, sparse["num_global_blocks"], horizontal=True)
    _add_random(layout, sparse, generator)
    return layout


def _bslongformer(sparse: SparseAttention, head: int, size: int, generator: torch.Generator) -> Tensor:
    """A sliding window and chosen blocks as global ones in both directions."""
    layout = _sliding_window(sparse["num_sliding_window_blocks"], size)
    for start, stop in _global_ranges(sparse, size):
        _add_global(layout, start, stop, horizontal=True)
    return layout


def _windows(sizes: list[int], size: int) -> Tensor:
    layout = torch.zeros(size, size, dtype=torch.bool)
    start = index = 0
    while start < size:
        stop = start + max(1, sizes[min(index, len(sizes) - 1)] if sizes else 1)
        layout[start:stop, start:stop] = True
        start, index = stop, index + 1
    return layout


def _sliding_window(width: int, size: int) -> Tensor:
    """Each block sees `width` blocks centered on itself."""
    index = torch.arange(size)
    return (index[:, None] - index[None, :]).abs() <= width // 2


def _global_ranges(sparse: SparseAttention, size: int) -> list[tuple[int, int]]:
    starts, ends = sparse["global_block_indices"], sparse["global_block_end_indices"]
    ranges = zip(starts, ends if ends is not None else [start + 1 for start in starts], strict=True)
    return [(start, min(stop, size)) for start, stop in ranges if start < size]


def _add_global(layout: Tensor, start: int, stop: int, horizontal: bool) -> None:
    layout[:, start:stop] = True
    if horizontal:
        layout[start:stop, :] = True


def _add_random(layout: Tensor, sparse: SparseAttention, generator: torch.Generator) -> None:
    """Each row sees `num_random_blocks` more, drawn from those that the direction allows."""
    for row in range(len(layout)):
        allowed = row + 1 if sparse.is_causal else len(layout)
        chosen = torch.randperm(allowed, generator=generator)[: sparse["num_random_blocks"]]
        layout[row, chosen] = True

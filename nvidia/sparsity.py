"""Block-sparse attention: which blocks of keys each block of queries sees (DeepSpeed JSON's `sparse_attention`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import Problems, UserError, nearest

# mode → its parameters and their defaults
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
_LEAST = {"block": 1, "num_local_blocks": 1, "num_sliding_window_blocks": 1, "num_different_global_patterns": 1}


@dataclass(frozen=True)
class SparseAttention:
    """A checked `sparse_attention` block: its mode and that mode's parameters, defaults filled in."""

    mode: str
    parameters: Mapping[str, Any]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SparseAttention":
        mode = mapping.get("mode", "fixed")
        if mode not in _MODES:
            raise UserError(
                f"sparse_attention: mode is {mode!r}, expected one of {', '.join(_MODES)}{nearest(str(mode), _MODES)}"
            )
        defaults = _COMMON | _MODES[mode]
        problems = Problems()
        for key in mapping:
            if key != "mode" and key not in defaults:
                problems.add(f"sparse_attention: unknown key {key!r} for mode {mode!r}{nearest(key, defaults)}")
        parameters = {key: mapping.get(key, default) for key, default in defaults.items()}
        for key, value in parameters.items():
            _check_parameter(key, value, problems)
        problems.raise_if_any()
        _check_relations(parameters, problems)
        problems.raise_if_any()
        return cls(mode, parameters)

    def to_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, **self.parameters}

    def __getitem__(self, key: str) -> Any:
        return self.parameters[key]


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
    elif type(value) is not int or value < _LEAST.get(key, 0):
        problems.add(f"sparse_attention: {key} is {value!r}, expected a whole number from {_LEAST.get(key, 0)} up")


def _check_relations(parameters: Mapping[str, Any], problems: Problems) -> None:
    """Parameters that are each well-formed but do not fit together."""
    unidirectional = parameters.get("attention") == "unidirectional"
    if unidirectional and parameters.get("horizontal_global_attention"):
        problems.add("sparse_attention: horizontal_global_attention needs attention: bidirectional")
    local, wide = parameters.get("num_local_blocks"), parameters.get("num_global_blocks")
    if local is not None and wide is not None:
        if local % max(wide, 1) or wide < 1:
            problems.add(f"sparse_attention: num_global_blocks ({wide}) must divide num_local_blocks ({local})")
        elif (patterns := parameters["num_different_global_patterns"]) > local // wide:
            problems.add(
                f"sparse_attention: num_different_global_patterns ({patterns}) is past num_local_blocks / "
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
            f"sparse_attention: global_block_end_indices {ends} must give, for each of global_block_indices {starts}, "
            "a block past it"
        )

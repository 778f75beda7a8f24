"""Single values of the JSON files that are set on the command line, with --set KEY=VALUE."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, shortened
from common.json_files import load_json, parse_json

FLAG = "--set"
EXAMPLE = "mixed_seq_training.128.learning_rate=4e-4"


@dataclass(frozen=True)
class Override:
    """`path` leads to the value through nested objects; `source` is what the user wrote."""

    path: tuple[str, ...]
    value: Any
    source: str

    @classmethod
    def parse(cls, text: str) -> "Override":
        """KEY=VALUE: dots separate the levels of KEY; VALUE is JSON, or a word, which is a string."""
        key, equals, value = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise UserError(f"found {shortened(text)}, expected KEY=VALUE, such as {EXAMPLE}")
        return cls(path, _read_value(value, text), f"{FLAG} {text}")

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"


def _read_value(value: str, text: str) -> Any:
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        if value.strip()[:1] in ("", "{", "[", '"') or value.strip() in ("NaN", "Infinity", "-Infinity"):
            raise UserError(
                f"found {shortened(text)}, expected a JSON value or a word after '=' ({error}), as in {EXAMPLE}"
            ) from None
        return value


def load_with_overrides(path: Path, what: str, overrides: Sequence[Override]) -> tuple[dict[str, Any], str]:
    """The JSON object in `path` with the values set, and the name of both for messages: either may be wrong."""
    where = f"{path} with {' '.join(override.source for override in overrides)}" if overrides else str(path)
    return apply_overrides(load_json(path, what), overrides, path), where


def apply_overrides(content: dict[str, Any], overrides: Sequence[Override], path: Path) -> dict[str, Any]:
    """A copy of the `content` of the file `path`, with the values set. Of two values for one key the last counts."""
    content = copy.deepcopy(content)
    for override in overrides:
        parent = content
        *above, last = override.path
        for depth, part in enumerate(above, 1):
            parent = parent.setdefault(part, {})
            if not isinstance(parent, dict):
                block = ".".join(above[:depth])
                raise UserError(
                    f"{override.source}: {block} is {shortened(parent)} in {path}, expected an object {{…}}; set "
                    f"{block} itself"
                )
        parent[last] = override.value
    return content

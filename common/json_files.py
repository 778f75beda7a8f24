"""Strict reading of the user's JSON files."""

import json
import math
from pathlib import Path
from typing import Any

from common.errors import UserError, describe_error


def load_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`, without repeated keys, NaN or infinity. `what` describes the file in messages."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte-order mark
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; expected {what}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason}); expected {what}; save it as UTF-8") from None
    except OSError as error:
        described = describe_error(error) or f"{path}: cannot be read ({error})"
        raise UserError(f"{described}; expected {what}") from None
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: is not valid JSON: {error}; expected {what}, one JSON object; fix it at that position"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected {what}, one JSON object {{…}}, but found a {type(content).__name__}")
    return content


def parse_json(text: str) -> Any:
    """The JSON value in `text`, without repeated keys, NaN or infinity; ValueError or RecursionError if it is none."""
    return json.loads(
        text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant, parse_float=_finite_float
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {repeated[0]!r} occurs twice in one object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value

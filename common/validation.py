"""Content checked against a pydantic model: every problem in one sentence, unknown keys with the nearest known one."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from common.errors import Problems, nearest, shortened

M = TypeVar("M", bound=BaseModel)

CONFIGURATION_PAGE = "docs/configuration.md"
# pydantic's error type → what was expected; {…} are values of the error's context.
EXPECTATIONS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "dict_type": "an object {{…}}",
    "model_type": "an object {{…}}",
    "model_attributes_type": "an object {{…}}",
    "enum": "{expected}",
    "literal_error": "{expected}",
    "list_type": "a list […]",
    "tuple_type": "a list […]",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
}


def validate(
    kind: type[M],
    content: Mapping[str, Any],
    where: str,
    problems: Problems,
    block: str = "",
    page: str = CONFIGURATION_PAGE,
) -> M | None:
    """`content` as a `kind`, or None with one message per problem added to `problems`.

    `where` names the file and `block` the object in it, if `content` is not the whole file; `page` describes its keys.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        for _, message in describe_errors(kind, error, block, page):
            problems.add(f"{where}: {message}")
        return None


def describe_errors(
    kind: type[BaseModel], error: ValidationError, block: str = "", page: str = CONFIGURATION_PAGE
) -> list[tuple[str, str]]:
    """The top-level key and the message of each problem that `kind` found."""
    return [
        (str(detail["loc"][0]) if detail["loc"] else "", _describe(kind, detail, block, page))
        for detail in error.errors()
    ]


def describe_value(detail: Any) -> str:
    """One of pydantic's findings about a value: what was found and what was expected."""
    found = f"found {shortened(detail['input'])}"
    if detail["type"] == "value_error":  # raised by a validator of ours, with a complete message
        return str(detail["ctx"]["error"])
    if detail["type"] in EXPECTATIONS:
        return f"{found}, expected {EXPECTATIONS[detail['type']].format(**detail.get('ctx', {}))}"
    return f"{found}, but {detail['msg'][0].lower()}{detail['msg'][1:]}"


def key_names(kind: type[BaseModel]) -> list[str]:
    """The keys of a model, as a JSON file spells them."""
    return [str(field.alias or name) for name, field in kind.model_fields.items()]


def _describe(kind: type[BaseModel], detail: Any, block: str, page: str) -> str:
    *above, last = [str(part) for part in detail["loc"]] or [""]
    path = ".".join(part for part in (block, *above, last) if part not in ("", "[key]"))
    if detail["type"] == "extra_forbidden":
        remedy = f"; expected one of those in {page}; remove it"
        return f"unknown key {path!r}{nearest(last, _known_keys(kind, above), otherwise=remedy)}"
    if detail["type"] == "missing":
        return f"the key {path!r} is missing; add it, as {page} describes"
    return f"{path}: {describe_value(detail)}" if path else describe_value(detail)


def _known_keys(kind: Any, path: list[str]) -> list[str]:
    """The keys of the object that `path` leads to from `kind`; none if it leads to no model."""
    for key in path:
        kind = _find_container(_type_of_key(kind, key))
    return key_names(kind) if _is_model(kind) else []


def _type_of_key(kind: Any, key: str) -> Any:
    if _is_model(kind):
        return next((field.annotation for name, field in kind.model_fields.items() if key in (name, field.alias)), None)
    return get_args(kind)[1] if get_origin(kind) is dict else None


def _find_container(kind: Any) -> Any:
    """The model or dictionary type in an annotation such as `Optional[Annotated[Block, …]]`."""
    if get_origin(kind) is Annotated:
        return _find_container(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return next((found for part in get_args(kind) if (found := _find_container(part)) is not None), None)
    return kind if _is_model(kind) or get_origin(kind) is dict else None


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)

"""Groups of flags as frozen models: one definition from which argparse's flags and the typed values are made."""

import argparse
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import Unsure
from common.validation import describe_value


@dataclass(frozen=True)
class Metavar:
    """The name of a type's value in --help, as metadata of its annotation."""

    name: str


def flag(help: str, default: Any = None, *aliases: str, **options: Any) -> Any:
    """A field of a group. `default` is `...` for a required flag; `options` are add_argument()'s, such as nargs."""
    return Field(default, description=help, json_schema_extra={"aliases": list(aliases), "options": options})


class FlagGroup(BaseModel):
    """A group of flags under its title in --help. A flag is named as its field: `--max_steps` is `max_steps`.

    Reading a flag that the user gave wrongly raises Unsure: what follows from it cannot be checked.
    """

    model_config = ConfigDict(frozen=True)

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(cls.model_config["title"])
        hints = get_type_hints(cls, include_extras=True)
        for name, field in cls.model_fields.items():
            extra: Any = field.json_schema_extra
            given = {"required": True} if field.is_required() else {"default": field.default}
            options = {**given, **_options_of_type(hints[name], field.default), **extra["options"]}
            group.add_argument(
                *(options.pop("names", None) or (f"--{name}",)),
                *extra["aliases"],
                dest=name,
                help=field.description,
                **options,
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The group of parsed `arguments`, from which wrongly given flags are absent."""
        group = cls.model_construct()
        group.__dict__.clear()  # of the defaults, which argparse has filled in
        for name, value in vars(arguments).items():
            if name in cls.model_fields:
                group.__dict__[name] = tuple(value) if isinstance(value, list) else value
        return group

    def __getattr__(self, name: str) -> Any:  # called for absent attributes only
        if name in type(self).model_fields:
            raise Unsure(name)
        raise AttributeError(name)


def _options_of_type(hint: Any, default: Any) -> dict[str, Any]:
    """add_argument()'s options for a field of type `hint`."""
    is_union = get_origin(hint) in (Union, UnionType)
    (kind,) = [part for part in (get_args(hint) if is_union else [hint]) if part is not type(None)]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default is True else "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    options: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        options["nargs"], kind = "+", get_args(kind)[0]
    for part in getattr(kind, "__metadata__", ()):
        if isinstance(part, Metavar):
            options["metavar"] = part.name
    return {**options, "type": partial(_parse, TypeAdapter(kind))}


def _parse(adapter: TypeAdapter[Any], word: str) -> Any:
    try:
        return adapter.validate_python(word)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(describe_value(error.errors()[0])) from None

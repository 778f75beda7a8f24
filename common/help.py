"""An argparse parser that reports all mistakes on a command line at once, and types of flags."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from common.errors import Problems, Unsure, closest, nearest, shortened

T = TypeVar("T")

# argparse's own pattern has no exponent, so it would read -1e-3 as a flag.
NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


class Arguments(argparse.Namespace):
    """A command's flags. Reading one that is wrong, or required and missing, raises Unsure."""

    def __getattr__(self, name: str) -> Any:  # called for absent attributes only
        if name in vars(self).get("unsure_flags", ()):
            raise Unsure(name)
        raise AttributeError(name)

    def forget(self, names: Iterable[str]) -> None:
        self.unsure_flags = frozenset(names)
        for name in self.unsure_flags & vars(self).keys():
            delattr(self, name)


class Parser(argparse.ArgumentParser):
    """argparse, but all mistakes are raised together as one UserError, and flags cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._begin()

    def _begin(self) -> None:
        self._problems = Problems()
        self._given: set[argparse.Action] = set()
        self._without_value: set[argparse.Action] = set()
        self._wrong: set[str] = set()  # destinations of wrong or missing flags
        self._lifted: tuple[list[argparse.Action], list[Any]] = ([], [])  # required, but declared optional meanwhile

    def error(self, message: str) -> NoReturn:
        """A mistake after which argparse cannot continue; raised with those before it."""
        self._problems.add(f"{message}; see --help")
        self._problems.raise_if_any()
        raise AssertionError("there is a problem")

    def parse_args(  # type: ignore[override]  # argparse declares three overloads for one behaviour
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        arguments, problems = self.collect(args)
        problems.raise_if_any()
        return arguments

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the known flags; the remaining words are returned."""
        arguments, rest = self._read(args)
        self._problems.raise_if_any()
        return arguments, rest

    def collect(self, args: Sequence[str] | None = None) -> tuple[argparse.Namespace, Problems]:
        """The parsed flags, and all mistakes, with the nearest name for each unknown flag.

        Reading a flag that is missing, misspelt or wrong raises Unsure.
        """
        arguments, unknown = self._read(args)
        known = {option: action.dest for action in self._actions for option in action.option_strings}
        for before, word in pairwise(["", *unknown]):
            if word.startswith("-"):
                name = word.split("=")[0]
                hint = nearest(name, known, otherwise="; expected one that --help lists; remove it")
                self._problems.add(f"unknown flag {word!r}{hint}")
                self._wrong.update(known[found] for found in [closest(name, known)] if found is not None)
            elif not before.startswith("-") or "=" in before:  # after an unknown flag it may be that flag's value
                self._problems.add(
                    f"unexpected word {word!r} on the command line; expected flags and their values, as --help lists "
                    f"them; remove it"
                )
        if self._problems.messages:
            arguments.forget(self._wrong)
        return arguments, self._problems

    def _read(self, args: Sequence[str] | None) -> tuple[Arguments, list[str]]:
        self._begin()
        actions = [action for action in self._actions if action.required]
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        self._lifted = (actions, groups)
        self._set_required(actions, groups, False)  # argparse would stop at the first missing one
        try:
            arguments, rest = super().parse_known_args(args, Arguments())
        finally:
            self._lifted = ([], [])
            self._set_required(actions, groups, True)
        absent = [action for action in actions if action not in self._given]
        self._wrong.update(action.dest for action in absent)
        if absent:
            missing = [_name_of(action) for action in absent]
            self._problems.add(f"the following arguments are required: {', '.join(missing)}; see --help")
        for group in groups:
            if self._given.isdisjoint(group._group_actions):
                names = " ".join(_name_of(action) for action in group._group_actions)
                self._problems.add(f"one of the arguments {names} is required; see --help")
        return arguments, rest

    def print_help(self, file: Any = None) -> None:
        self._set_required(*self._lifted, True)  # --help is printed while arguments are read
        super().print_help(file)

    def _set_required(self, actions: list[argparse.Action], groups: list[Any], is_required: bool) -> None:
        for action in actions:
            action.required = is_required
        for group in groups:
            group.required = is_required

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given.add(action)
        if action in self._without_value:
            return action.default
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._problems.add(f"{error}; see --help")
            self._wrong.add(action.dest)
            return action.default

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._problems.add(f"{error}; see --help")
            self._without_value.add(action)
            self._wrong.add(action.dest)
            return 0


def _name_of(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or action.dest


class WrongValue(argparse.ArgumentTypeError, ValueError):
    """A flag's value is not of its type; argparse and pydantic both show the message."""


def _number(kind: Callable[[str], T], is_valid: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """A flag's type: text read by `kind` and accepted by `is_valid`."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            value = kind(text)
            if is_valid(value):
                return value
        raise WrongValue(f"found {shortened(text)}, expected {expected}")

    return parse


positive_int = _number(int, lambda value: value >= 1, "a whole number of at least 1")
whole_number = _number(int, lambda value: value >= 0, "a whole number of at least 0")
seed_number = _number(int, lambda value: 0 <= value < 2**63, "a whole number from 0 to 2^63 - 1, such as 42")
positive_float = _number(float, lambda value: 0 < value < math.inf, "a finite number above 0, such as 2.5")
zero_or_more = _number(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0, such as 0.0")
seconds = _number(float, lambda value: 0 <= value < 1e9, "seconds of at least 0, such as 2.5")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, unless it has none or the text already states it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

"""An argparse parser that reports all mistakes on a command line at once, and types of flags."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from common.errors import Problems, closest, shortened

T = TypeVar("T")

# argparse's own pattern has no exponent, so it would read -1e-3 as a flag.
NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


class Parser(argparse.ArgumentParser):
    """argparse, but all mistakes are raised together as one UserError, and flags cannot be abbreviated.

    `hints`: flags that do not exist but that users try, and what to pass instead.
    """

    def __init__(self, hints: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._hints = hints or {}
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._begin()

    def _begin(self) -> None:
        self._problems = Problems()
        self._given: set[argparse.Action] = set()
        self._without_value: set[argparse.Action] = set()
        self._wrong: set[str] = set()  # destinations of wrong or missing flags
        self._required: list[Any] = []  # flags and groups of which one is required; optional while argparse parses

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
        self._report_missing()
        self._problems.raise_if_any()
        return arguments, rest

    def collect(self, args: Sequence[str] | None = None) -> tuple[argparse.Namespace, Problems]:
        """The parsed flags, and all mistakes, with the nearest name for each unknown flag.

        Flags that are missing, misspelt or wrong are absent from the namespace.
        """
        arguments, unknown = self._read(args)
        known = {option: action.dest for action in self._actions for option in action.option_strings}
        for before, word in pairwise(["", *unknown]):
            if word.startswith("-"):
                self._report_unknown(word, known)
            elif not before.startswith("-") or "=" in before:  # after an unknown flag it may be that flag's value
                self._problems.add(
                    f"unexpected word {word!r} on the command line; expected flags and their values, as --help lists "
                    f"them; remove it"
                )
        self._report_missing()
        for name in self._wrong & vars(arguments).keys():
            delattr(arguments, name)
        return arguments, self._problems

    def _report_unknown(self, word: str, known: Mapping[str, str]) -> None:
        name = word.split("=")[0].replace("-", "_").replace("__", "--", 1)
        found = closest(name, [*known, *self._hints])
        if found is not None and found not in known:
            self._problems.add(f"unknown flag {word!r}; pass {self._hints[found]}")
            return
        remedy = "expected one that --help lists; remove it" if found is None else f"did you mean {found!r}?"
        self._problems.add(f"unknown flag {word!r}; {remedy}")
        if found is not None:
            self._wrong.add(known[found])

    def _read(self, args: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        self._begin()
        required: list[Any] = [*self._actions, *self._mutually_exclusive_groups]
        self._required = [item for item in required if item.required]
        self._set_required(False)  # argparse would stop at the first missing one
        try:
            arguments, rest = super().parse_known_args(args)
        finally:
            self._set_required(True)
        return arguments, rest

    def _report_missing(self) -> None:
        """Report required flags that are absent, but not those that a misspelt flag stands for."""
        answered = {action for action in self._actions if action in self._given or action.dest in self._wrong}
        absent = [item for item in self._required if answered.isdisjoint(getattr(item, "_group_actions", (item,)))]
        flags = [item for item in absent if isinstance(item, argparse.Action)]
        self._wrong.update(action.dest for action in flags)
        if flags:
            names = ", ".join(map(_name_of, flags))
            self._problems.add(f"the following arguments are required: {names}; see --help")
        for group in (item for item in absent if item not in flags):
            names = " ".join(map(_name_of, group._group_actions))
            self._problems.add(f"one of the arguments {names} is required; see --help")

    def print_help(self, file: Any = None) -> None:
        self._set_required(True)  # --help is printed while arguments are read
        super().print_help(file)

    def _set_required(self, is_required: bool) -> None:
        for item in self._required:
            item.required = is_required

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given.add(action)
        if action in self._without_value:
            return _no_value(action)
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._problems.add(f"{error}; see --help")
            self._wrong.add(action.dest)
            return _no_value(action)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._problems.add(f"{error}; see --help")
            self._without_value.add(action)
            self._wrong.add(action.dest)
            return 0


def _no_value(action: argparse.Action) -> Any:
    """What a wrongly given flag leaves behind until it is removed from the namespace."""
    return [] if isinstance(action, argparse._ExtendAction) else action.default


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
share = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1, such as 0.1")
zero_or_more = _number(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0, such as 0.0")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, unless it has none or the text already states it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

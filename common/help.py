"""How commands read their flags, show them, and refuse wrong ones."""

import argparse
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

from common.errors import Problems, Unsure, closest, nearest

# argparse's own pattern knows no exponent, and takes -1e-3 for a flag.
NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


class Arguments(argparse.Namespace):
    """A command's flags. One that was given wrongly, or is required and missing, raises Unsure when it is asked for."""

    def __getattr__(self, name: str) -> Any:  # called for what is not there
        if name in vars(self).get("unsure_flags", ()):
            raise Unsure(name)
        raise AttributeError(name)

    def forget(self, names: Iterable[str]) -> None:
        self.unsure_flags = frozenset(names)
        for name in self.unsure_flags & vars(self).keys():
            delattr(self, name)


class Parser(argparse.ArgumentParser):
    """argparse, with all of a user's mistakes raised as one UserError, so that they can be tested and are shown once.

    No flag can be abbreviated: what `--max` means today would be another flag tomorrow.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._negative_number_matcher = NEGATIVE_NUMBER
        self._begin()

    def _begin(self) -> None:
        self._problems = Problems()
        self._given: set[argparse.Action] = set()
        self._without_value: set[argparse.Action] = set()
        self._wrong: set[str] = set()  # where flags store their values
        self._lifted: tuple[list[argparse.Action], list[Any]] = ([], [])  # what is required, while it is not asked for

    def error(self, message: str) -> NoReturn:
        """A mistake that argparse cannot go on after; told with those before it."""
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
        """Parse what is known; the words left over are for someone else."""
        arguments, rest = self._read(args)
        self._problems.raise_if_any()
        return arguments, rest

    def collect(self, args: Sequence[str] | None = None) -> tuple[argparse.Namespace, Problems]:
        """What the words say and all that is wrong with them, the nearest name for each unknown flag included.

        A flag that is missing or misspelt, or whose value is wrong, is Unsure.
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
        self._set_required(actions, groups, False)  # argparse would end with the first that is missing
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

    def format_usage(self) -> str:
        with self._as_declared():
            return super().format_usage()

    def format_help(self) -> str:
        with self._as_declared():
            return super().format_help()

    @contextmanager
    def _as_declared(self) -> Generator[None]:
        """--help is shown while arguments are read: what is required must look like it."""
        lifted = self._lifted
        self._set_required(*lifted, True)
        try:
            yield
        finally:
            self._set_required(*lifted, False)

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


def positive_int(text: str) -> int:
    """A flag's type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 1")
    return value


def whole_number(text: str) -> int:
    """A flag's type: a whole number from 0 up."""
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0 up")
    return int(text)


def seed_number(text: str) -> int:
    """A flag's type: what every random generator here takes."""
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0 to 2^63 - 1, such as 42")
    return value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, except where there is none or the text tells it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

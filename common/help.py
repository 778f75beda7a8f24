"""How commands read their flags, show them, and refuse wrong ones."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from common.errors import Problems, UserError, nearest


class Parser(argparse.ArgumentParser):
    """argparse, with a user's mistake raised as UserError so that it can be tested and is shown once.

    No flag can be abbreviated: what `--max` means today would be another flag tomorrow.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

    def parse_args(  # type: ignore[override]  # argparse declares three overloads for one behaviour
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, and report all unknown flags at once, each with the nearest known one."""
        arguments, unknown = self.parse_known_args(args, namespace)
        known = [option for action in self._actions for option in action.option_strings]
        problems = Problems()
        for word in unknown:
            if word.startswith("-"):
                hint = nearest(word.split("=")[0], known, otherwise="; remove it, or see --help")
                problems.add(f"unknown flag {word!r}{hint}")
            else:
                problems.add(f"unexpected word {word!r} on the command line; remove it, or see --help")
        problems.raise_if_any()
        return arguments


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

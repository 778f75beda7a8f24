"""Groups of a command's flags, by the kinds of flag that recur."""

import argparse
from pathlib import Path
from typing import Any

from common.help import positive_int


class FlagGroup:
    """A group under its title in --help. Every method takes names and options as argparse's add_argument does."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self.add = parser.add_argument_group(title).add_argument

    def switch(self, *names: str, **options: Any) -> None:
        """Off until it is given."""
        self.add(*names, action="store_true", **options)

    def count(self, *names: str, metavar: str = "N", **options: Any) -> None:
        """A whole number from 1 on."""
        self.add(*names, type=positive_int, metavar=metavar, **options)

    def folder(self, *names: str, **options: Any) -> None:
        self.add(*names, type=Path, metavar="DIR", **options)

    def file(self, *names: str, **options: Any) -> None:
        self.add(*names, type=Path, metavar="FILE", **options)

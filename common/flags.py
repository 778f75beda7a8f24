"""Groups of a command's flags, under a title in --help."""

import argparse
from typing import Any

from common.help import positive_int


class FlagGroup:
    """`add` takes what argparse's add_argument() takes."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self.add = parser.add_argument_group(title).add_argument

    def switch(self, *names: str, **options: Any) -> None:
        """A flag without a value, off by default."""
        self.add(*names, action="store_true", **options)

    def count(self, *names: str, metavar: str = "N", **options: Any) -> None:
        """A whole number of at least 1."""
        self.add(*names, type=positive_int, metavar=metavar, **options)

"""The only place that writes to the terminal."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_A_LINE = 30.0  # between lines of progress where there is no terminal


class Console:
    """Where a process speaks. A rank that should stay silent gets `enabled=False`."""

    def __init__(self) -> None:
        self.enabled = True

    def say(self, text: str = "") -> None:
        if self.enabled:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, text: str) -> None:
        if self.enabled:
            tqdm.write(f"warning: {text}", file=sys.stderr)
            sys.stderr.flush()

    def progress(self, iterable: Iterable[Any] | None = None, *, in_lines: bool = False, **options: Any) -> tqdm:
        """A tqdm bar on stderr; silent when this rank is.

        Where stderr is no terminal it is silent too, or with `in_lines` says a plain line now and then.
        """
        is_terminal = sys.stderr.isatty()
        if in_lines and self.enabled and not is_terminal:
            return _Lines(iterable, mininterval=SECONDS_A_LINE, delay=SECONDS_A_LINE, **options)
        return tqdm(iterable, disable=not (self.enabled and is_terminal), **options)


class _Lines(tqdm):
    """Progress as lines of their own, for logs."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        self.fp.write(f"{msg or self}\n")
        self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Nothing stands there to be cleared."""


console = Console()

"""The only place that writes to the terminal."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


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

    def progress(self, iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
        """A tqdm bar on stderr; silent when this rank is, or when stderr is no terminal."""
        return tqdm(iterable, disable=not (self.enabled and sys.stderr.isatty()), **options)


console = Console()

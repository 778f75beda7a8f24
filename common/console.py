"""The only place that writes to the terminal."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO
from weakref import WeakSet

from tqdm import tqdm

SECONDS_A_LINE = 30.0  # between lines of progress where there is no terminal


class Console:
    """Where a process speaks. A rank that should stay silent gets `enabled=False`.

    No write fails: a pipe that nobody reads any more or a full disk behind stdout costs the words, never the run.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._bars: WeakSet[_Bar] = WeakSet()

    def say(self, text: str = "") -> None:
        if self.enabled:
            reason = _write(sys.stdout, text, self._has_bar())
            if reason is not None:
                self.warn(f"standard output cannot be written any more ({reason}); it goes on without")

    def warn(self, text: str) -> None:
        if self.enabled:
            _write(sys.stderr, f"warning: {text}", self._has_bar())

    def _has_bar(self) -> bool:
        """Whether a bar stands on the terminal, which words must be put above of."""
        return any(not bar.disable for bar in self._bars)

    def progress(self, iterable: Iterable[Any] | None = None, *, in_lines: bool = False, **options: Any) -> tqdm:
        """A tqdm bar on stderr; silent when this rank is.

        Where stderr is no terminal it is silent too, or with `in_lines` says a plain line now and then.
        """
        is_heard = self.enabled and sys.stderr is not None
        is_terminal = is_heard and sys.stderr.isatty()
        if in_lines and is_heard and not is_terminal:
            return _Lines(iterable, mininterval=SECONDS_A_LINE, delay=SECONDS_A_LINE, **options)
        bar = _Bar(iterable, disable=not is_terminal, **options)
        self._bars.add(bar)
        return bar


class _Bar(tqdm):
    """A bar whose terminal may go away: then it shows nothing any more.

    An error out of display() would end the run, and leave tqdm's lock taken for every other thread.
    """

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        try:
            return bool(super().display(msg, pos))
        except (OSError, ValueError):
            self.disable = True
            return False


class _Lines(tqdm):
    """Progress as lines of their own, for logs."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        _write(sys.stderr, f"{msg or self}")
        return True

    def clear(self, nolock: bool = False) -> None:
        """Nothing stands there to be cleared."""


def write_error(text: str) -> None:
    """The last words of a process, whether or not it is one that speaks."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    _write(sys.stderr, text)


def _write(stream: TextIO | None, text: str, has_bar: bool = False) -> str | None:
    """Write a line; why that was not possible, once: what comes after it goes nowhere.

    Only beside a bar does it wait for tqdm's lock: a thread that speaks must not hang on another's.
    """
    if stream is None:  # closed before Python began
        return None
    try:
        if has_bar:
            tqdm.write(text, file=stream)
        else:
            stream.write(f"{text}\n")
        stream.flush()
    except UnicodeEncodeError:  # a terminal that has no such characters
        return _write(stream, text.encode("ascii", "replace").decode(), has_bar)
    except (OSError, ValueError) as error:
        _send_nowhere(stream)
        return getattr(error, "strerror", None) or str(error)
    return None


def _send_nowhere(stream: TextIO) -> None:
    """What is still in its buffer would fail again at the process's end, and make its exit code 120."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


console = Console()

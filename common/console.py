"""The only place that writes to the terminal."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO
from weakref import WeakSet

from tqdm import tqdm

SECONDS_PER_LINE = 30.0  # between lines of progress without a terminal


class Console:
    """The output of a process. Ranks that should print nothing have `enabled=False`.

    No write raises: a closed pipe or a full disk behind stdout loses the output, never the run.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._bars: WeakSet[_Bar] = WeakSet()

    def enable(self, is_enabled: bool = True) -> None:
        self.enabled = is_enabled

    def say(self, text: str = "") -> None:
        if self.enabled:
            reason = _write(sys.stdout, text, self._has_bar())
            if reason is not None:
                self.warn(f"standard output can no longer be written ({reason}); continuing without it")

    def warn(self, text: str) -> None:
        if self.enabled:
            _write(sys.stderr, f"warning: {text}", self._has_bar())

    def _has_bar(self) -> bool:
        """Whether a bar is shown, above which text must be printed."""
        return any(not bar.disable for bar in self._bars)

    def progress(self, iterable: Iterable[Any] | None = None, *, in_lines: bool = False, **options: Any) -> tqdm:
        """A tqdm bar on stderr, shown only on an enabled rank and in a terminal.

        Without a terminal, `in_lines` prints a plain line every SECONDS_PER_LINE.
        """
        is_shown = self.enabled and sys.stderr is not None
        is_terminal = is_shown and sys.stderr.isatty()
        if in_lines and is_shown and not is_terminal:
            return _Lines(iterable, mininterval=SECONDS_PER_LINE, delay=SECONDS_PER_LINE, **options)
        bar = _Bar(iterable, disable=not is_terminal, **options)
        self._bars.add(bar)
        return bar


class _Bar(tqdm):
    """A bar that turns itself off when its terminal goes away.

    An error raised by display() would end the run and leave tqdm's lock taken for every other thread.
    """

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        try:
            return bool(super().display(msg, pos))
        except (OSError, ValueError):
            self.disable = True
            return False


class _Lines(tqdm):
    """Progress as separate lines, for logs."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        _write(sys.stderr, f"{msg or self}")
        return True

    def clear(self, nolock: bool = False) -> None:
        """There is nothing to clear."""


def write_error(text: str) -> None:
    """Write to stderr even if the console of this process is disabled."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    _write(sys.stderr, text)


def _write(stream: TextIO | None, text: str, has_bar: bool = False) -> str | None:
    """Write a line. Returns why that failed, once: later output is discarded.

    Takes tqdm's lock only if a bar is shown, so that a thread never waits for a lock that another one holds.
    """
    if stream is None:  # closed before Python started
        return None
    try:
        if has_bar:
            tqdm.write(text, file=stream)
        else:
            stream.write(f"{text}\n")
        stream.flush()
    except UnicodeEncodeError:  # a terminal without such characters
        return _write(stream, text.encode("ascii", "replace").decode(), has_bar)
    except (OSError, ValueError) as error:
        _discard(stream)
        return getattr(error, "strerror", None) or str(error)
    return None


def _discard(stream: TextIO) -> None:
    """Redirect to /dev/null: flushing the buffer at exit would fail again and make the exit code 120."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


console = Console()

"""Errors that a user can fix: raising, collecting and reporting them."""

import difflib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from common.console import console, write_error
from common.processes import STUCK_EXIT_CODE, USER_ERROR_EXIT_CODE

T = TypeVar("T")


class UserError(ValueError):
    """Something the user can fix. The message says what is wrong, what was found and expected, and what to do.

    `parts` are the single messages if it combines several.
    """

    def __init__(self, message: str, parts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.parts = tuple(parts) or (message,)


class Unsure(Exception):
    """A flag was read that the user gave wrongly, which has been reported; what depends on it cannot be checked."""


class ReportedElsewhere(Exception):
    """Another rank has failed and reports why; this one exits silently with the same code."""

    def __init__(self, message: str, code: int = USER_ERROR_EXIT_CODE) -> None:
        super().__init__(message)
        self.code = code


class RankLost(Exception):
    """Another rank is lost or never joined. `code` asks for a restart: there is nothing to fix on this rank."""

    def __init__(self, message: str, code: int = STUCK_EXIT_CODE) -> None:
        super().__init__(message)
        self.code = code


class Problems:
    """Collects messages, so that all problems are reported at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """`action`'s result; None if it raised a UserError, whose messages are added, or Unsure."""
        try:
            return action()
        except Unsure:
            return None
        except (UserError, OSError) as error:
            message = describe_error(error)
            if message is None:
                raise
            for part in getattr(error, "parts", (message,)):
                self.add(part)
            return None

    def raise_if_any(self) -> None:
        if len(self.messages) == 1:
            raise UserError(self.messages[0])
        if self.messages:
            listed = "\n".join(f"  - {message}" for message in self.messages)
            raise UserError(f"{len(self.messages)} problems were found:\n{listed}", self.messages)


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint to append to "unknown X": the closest known name, or `otherwise` if none is close."""
    found = closest(name, known)
    return otherwise if found is None else f"; did you mean {found!r}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The only known name with these initials (lr, learning_rate), else the most similar one, or None."""
    known = list(known)
    longer = [other for other in known if name == _initials(other)]
    if len(longer) == 1 and name not in known:
        return longer[0]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    shorter = [other for other in known if other == _initials(name)]
    return next(iter([*similar, *shorter]), None)


def _initials(name: str) -> str | None:
    """`learning_rate` → `lr`, `--learning_rate` → `--lr`; None for a single word."""
    words = name.lstrip("-").split("_")
    dashes = name[: len(name) - len(name.lstrip("-"))]
    return dashes + "".join(word[:1] for word in words) if len(words) > 1 else None


def shortened(value: object) -> str:
    """The value's repr for messages, truncated if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format very long integers
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text):,} characters)"


# System errors with causes outside this program, and what to do about them.
SYSTEM_REMEDIES = {
    errno.EACCES: "expected read and write permission; grant it to this user, or use another path",
    errno.EPERM: "expected read and write permission; grant it to this user, or use another path",
    errno.EROFS: "the file system is mounted read-only; expected a writable one; use another path",
    errno.ENOSPC: "free some space there, or use another path",
    errno.EDQUOT: "the quota is exceeded; free some space there, or use another path",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "the links form a cycle; fix them, or use another path",
    errno.ENOTDIR: "found a file, expected a folder; remove it, or use another path",
    errno.EISDIR: "found a folder, expected a file; remove it, or use another path",
    errno.EMFILE: "raise the limit on open files with `ulimit -n 4096`",
    errno.EIO: "the disk or the network file system failed; check it, and start again",
    errno.ESTALE: "the file handle of the network file system is stale; mount it again",
}


def describe_error(error: BaseException) -> str | None:
    """The message for a mistake of the user or an error of the system; None if it may be a bug of this program."""
    if isinstance(error, OSError) and error.errno in SYSTEM_REMEDIES and error.filename is not None:
        return f"{error.filename}: {error.strerror}; {SYSTEM_REMEDIES[error.errno]}"
    return str(error) if isinstance(error, UserError) else None


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with `error` in run_command()."""
    return 1 if describe_error(error) is None else USER_ERROR_EXIT_CODE


def run_command(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run a command's main() and exit: a UserError becomes one message and exit code 2."""
    try:
        sys.exit(main(None))
    except RankLost as error:
        _end_with(str(error), error.code)
    except ReportedElsewhere as error:
        _wait_for_report(error.code)
        sys.exit(error.code)
    except (UserError, OSError) as error:
        message = describe_error(error)
        if message is None:
            raise
        _end_with(message)
    except KeyboardInterrupt:
        write_error("interrupted")
        sys.exit(130)


def _wait_for_report(code: int) -> None:
    """Give the reporting rank time; if the launcher ends this process meanwhile, it exits with the same code."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(5)


def _end_with(message: str, code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    if not console.enabled:
        # All ranks usually fail alike: rank 0 reports, and the launcher ends the others before they do.
        _wait_for_report(code)
    write_error(f"error: {message}")
    sys.exit(code)

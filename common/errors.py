"""A user's mistake: how it is raised, collected and shown."""

import difflib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from common.console import console, write_error
from common.processes import USER_ERROR_EXIT_CODE

T = TypeVar("T")


class UserError(ValueError):
    """Something the user can mend. The message says what, what was found, what was expected and the remedy.

    `parts`: the single messages, where it tells several.
    """

    def __init__(self, message: str, parts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.parts = tuple(parts) or (message,)


class Unsure(Exception):
    """A value was asked for that the user gave wrongly. That has been noted; what follows from it cannot be judged."""


class ReportedElsewhere(Exception):
    """Another rank has failed and tells why; this one ends without a word, and with the same code."""

    def __init__(self, message: str, code: int = USER_ERROR_EXIT_CODE) -> None:
        super().__init__(message)
        self.code = code


class RankLost(Exception):
    """Another rank has gone, or never came. Nothing to mend here: `code` is that of a run to be started again."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Problems:
    """Collects the mistakes of one check, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """`action`'s result; None where it failed, with what it told noted, or where it cannot be judged."""
        try:
            return action()
        except Unsure:
            return None
        except UserError as error:
            for part in error.parts:
                self.add(part)
            return None
        except OSError as error:
            message = describe_system_error(error)
            if message is None:
                raise
            self.add(message)
            return None

    def raise_if_any(self) -> None:
        if len(self.messages) == 1:
            raise UserError(self.messages[0])
        if self.messages:
            listed = "\n".join(f"  - {message}" for message in self.messages)
            raise UserError(f"{len(self.messages)} problems were found:\n{listed}", self.messages)


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint to append to "unknown X": the closest known name, or `otherwise` when none is close."""
    found = closest(name, known)
    return otherwise if found is None else f"; did you mean {found!r}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, where one is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def shortened(value: object) -> str:
    """A value as messages show it: its repr, cut where it would fill the screen."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out very long integers
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text):,} characters)"


# What a system refuses for reasons that lie outside this program, and what can be done about it.
SYSTEM_REMEDIES = {
    errno.EACCES: "expected what this user may read and write; give this user the right to, or choose another place",
    errno.EPERM: "expected what this user may read and write; give this user the right to, or choose another place",
    errno.EROFS: "the file system is mounted read-only; expected one that can be written to; choose another place",
    errno.ENOSPC: "make room there, or choose another place",
    errno.EDQUOT: "the quota is used up; make room there, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "links lead in a circle; mend them, or choose another place",
    errno.ENOTDIR: "a file stands where a folder is expected; remove it, or choose another place",
    errno.EISDIR: "a folder stands where a file is expected; remove it, or choose another place",
    errno.EMFILE: "raise the limit on open files with `ulimit -n 4096`",
    errno.EIO: "the disk or the network file system fails; look at it, and start again",
    errno.ESTALE: "the network file system lost it; mount it again",
}


def describe_system_error(error: OSError) -> str | None:
    """What the system refused, as a message for people; None for what may be this program's own mistake."""
    remedy = SYSTEM_REMEDIES.get(error.errno or 0)
    if remedy is None or error.filename is None:
        return None
    return f"{error.filename}: the system refused it ({error.strerror}); {remedy}"


def exit_code_of(error: BaseException) -> int:
    """That of a process which ends with it: see run_command()."""
    is_told = isinstance(error, UserError) or (isinstance(error, OSError) and describe_system_error(error) is not None)
    return USER_ERROR_EXIT_CODE if is_told else 1


def run_command(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run a command's main() as the process: a user's mistake becomes one message and exit code 2."""
    try:
        sys.exit(main(None))
    except UserError as error:
        _end_with(str(error))
    except RankLost as error:
        _end_with(str(error), error.code)
    except ReportedElsewhere as error:
        _let_others_speak(error.code)
        sys.exit(error.code)
    except OSError as error:
        message = describe_system_error(error)
        if message is None:
            raise
        _end_with(message)
    except KeyboardInterrupt:
        write_error("interrupted")
        sys.exit(130)


def _let_others_speak(code: int) -> None:
    """Wait a little; a launcher that ends this process meanwhile gets its code all the same."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(5)


def _end_with(message: str, code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    if not console.enabled:
        # All ranks usually make the same mistake. Rank 0 tells, and the launcher ends the others before they do.
        _let_others_speak(code)
    write_error(f"error: {message}")
    sys.exit(code)

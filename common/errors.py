"""A user's mistake: how it is raised, collected and shown."""

import difflib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from common.console import console
from common.processes import USER_ERROR_EXIT_CODE


class UserError(ValueError):
    """Something the user can mend. The message says what, what was found, what was expected and the remedy."""


class ToldElsewhere(Exception):
    """The main rank has failed and tells why; this one ends without a word."""


class Problems:
    """Collects the mistakes of one check, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        self.messages.append(message)

    def raise_if_any(self) -> None:
        if len(self.messages) == 1:
            raise UserError(self.messages[0])
        if self.messages:
            listed = "\n".join(f"  - {message}" for message in self.messages)
            raise UserError(f"{len(self.messages)} problems were found:\n{listed}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown X": the closest known name, or nothing when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def run_command(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run a command's main() as the process: a user's mistake becomes one message and exit code 2."""
    try:
        sys.exit(main(None))
    except UserError as error:
        if not console.enabled:
            # All ranks usually make the same mistake. Rank 0 tells, and the launcher ends the others before they do.
            time.sleep(5)
        sys.stdout.flush()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USER_ERROR_EXIT_CODE)
    except ToldElsewhere:
        time.sleep(5)
        sys.exit(USER_ERROR_EXIT_CODE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)

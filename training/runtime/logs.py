"""The chatter of libraries: all of it in a file a rank, and only what matters on the console."""

import logging
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s"
# What these say at ERROR is for people; below it, for the file.
LOGGERS = ("DeepSpeed", "py.warnings")


MAX_HELD = 10_000  # records


class HeldFile(MemoryHandler):
    """Records for a file that is not made before `begin`: a run that cannot begin leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        super().__init__(MAX_HELD, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self.path = path

    def begin(self) -> None:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(self.path, delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        self.setTarget(file)
        self.flush()
        self.capacity = 1

    def close(self) -> None:
        if self.target is not None:
            self.target.close()
        super().close()


def begin_logs() -> None:
    """Begin the file that send_logs() named: the run has been built."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        if isinstance(handler, HeldFile):
            handler.begin()


def send_logs(folder: Path | None, rank: int) -> None:
    """Send the libraries' logs to `<folder>/rank_N.log` (None: nowhere), and their errors to the console too.

    The file is begun by begin_logs().
    """
    handlers: list[logging.Handler] = [_console_handler()]
    if folder is not None:
        handlers.append(HeldFile(folder / f"rank_{rank}.log"))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is told by others, and not once a line
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        for handler in handlers:
            logger.addHandler(handler)


def _console_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    return handler

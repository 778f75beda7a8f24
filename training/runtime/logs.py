"""Library logs: everything goes to one file per rank, and errors also to the console."""

import logging
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s"
# At ERROR and above these also go to the console.
LOGGERS = ("DeepSpeed", "py.warnings")
MAX_HELD = 10_000  # records


class HeldFile(MemoryHandler):
    """Holds records until begin() creates the file: a run that cannot start leaves nothing behind."""

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
    """Create the file that send_logs() named, once the run has been built."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        if isinstance(handler, HeldFile):
            handler.begin()


def send_logs(folder: Path | None, rank: int) -> None:
    """Send library logs to `<folder>/rank_N.log` (None: nowhere), and errors to the console too.

    Replaces the handlers of the loggers and captures warnings for the whole process. begin_logs() creates the file.
    """
    handlers: list[logging.Handler] = [_console_handler()]
    if folder is not None:
        handlers.append(HeldFile(folder / f"rank_{rank}.log"))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported elsewhere, not once per line
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

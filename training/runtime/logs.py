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


def send_logs(folder: Path | None, rank: int) -> None:
    """Send library logs to `<folder>/rank_N.log` (None: nowhere), and errors to the console too.

    Replaces the handlers of the loggers and captures warnings for the whole process. Records are held until
    begin_logs() creates the file: a run that cannot start leaves nothing behind.
    """
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handlers: list[logging.Handler] = [errors]
    if folder is not None:
        file = logging.FileHandler(folder / f"rank_{rank}.log", delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        handlers.append(MemoryHandler(MAX_HELD, logging.CRITICAL + 1, file, flushOnClose=False))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported elsewhere, not once per line
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for old in list(logger.handlers):
            logger.removeHandler(old)
            for each in (getattr(old, "target", None), old):
                if each is not None:
                    each.close()
        for handler in handlers:
            logger.addHandler(handler)


def begin_logs() -> None:
    """Create the file that send_logs() named, once the run has been built."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        if isinstance(handler, MemoryHandler) and isinstance(handler.target, logging.FileHandler):
            with suppress(OSError):
                Path(handler.target.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            handler.flush()
            handler.capacity = 1

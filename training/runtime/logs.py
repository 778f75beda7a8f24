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


def send_logs(*, to_file: bool) -> None:
    """Send library logs to the file that begin_logs() creates, or nowhere, and errors to the console too.

    Replaces the handlers of the loggers and captures warnings for the whole process. Records are held until
    begin_logs(): a run that cannot start leaves nothing behind.
    """
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    held = MemoryHandler(MAX_HELD, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
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
        for handler in (errors, held) if to_file else (errors,):
            logger.addHandler(handler)


def begin_logs(folder: Path, rank: int) -> None:
    """Create `<folder>/rank_N.log`, once the run has been built, if logs go to a file."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        if isinstance(handler, MemoryHandler):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(folder / f"rank_{rank}.log", delay=True, encoding="utf-8")
            file.setFormatter(logging.Formatter(FORMAT))
            handler.setTarget(file)
            handler.flush()
            handler.capacity = 1

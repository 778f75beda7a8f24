"""The chatter of libraries: all of it in a file a rank, and only what matters on the console."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s"
# What these say at ERROR is for people; below it, for the file.
LOGGERS = ("DeepSpeed", "py.warnings")


def send_logs(folder: Path | None, rank: int) -> None:
    """Send the libraries' logs to `<folder>/rank_N.log` (None: nowhere), and their errors to the console too."""
    handlers: list[logging.Handler] = [_console_handler()]
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"rank_{rank}.log", delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        handlers.append(file)
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

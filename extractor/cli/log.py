"""The client's log on stderr: `-v` and `-vv`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from tqdm import tqdm

from extractor.core.log_line import log_line
from extractor.core.printable import printable

LEVELS = (logging.NOTSET, logging.INFO, logging.DEBUG)


class StderrHandler(logging.Handler):
    """Writes a record as a line beside a progress bar, or as an object of `--log-json`."""

    def __init__(self, as_objects: Callable[[], bool]) -> None:
        super().__init__()
        self._as_objects = as_objects
        self.setFormatter(
            logging.Formatter(
                "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S"
            )
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._as_objects():
                tqdm.write(printable(self.format(record)), file=sys.stderr)
                return
            line = log_line(
                record.getMessage(),
                event="log",
                level=record.levelname.lower(),
                logger=record.name,
            )
            sys.stderr.write(f"{line}\n")  # at once: threads log
        except OSError:
            pass  # nobody reads it
        except Exception:
            self.handleError(record)


def log_to_stderr(verbosity: int, *, as_objects: Callable[[], bool]) -> None:
    """Set up the client's logger: silent at verbosity 0, INFO at 1, DEBUG at 2."""
    logger = logging.getLogger("extractor")
    logger.setLevel(LEVELS[verbosity])
    for handler in list(logger.handlers):
        if isinstance(handler, StderrHandler):
            logger.removeHandler(handler)
    if verbosity:
        logger.addHandler(StderrHandler(as_objects))

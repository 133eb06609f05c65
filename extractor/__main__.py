"""`extractor` and `python -m extractor`."""

from __future__ import annotations

# Few and small: until `main` runs, a signal ends the process in Python's own way.
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130  # `errors.Interrupted.exit_code`, without its imports


def main() -> NoReturn:
    """The command line. Importing it takes seconds, in which signals end it in order too."""
    try:
        _handle_signals(_end_at_once)
        from extractor.cli.main import main as command_line

        # From here on there may be something to clean up.
        _handle_signals(signal.default_int_handler)
        command_line()
    except KeyboardInterrupt:
        _end_at_once(signal.SIGINT, None)
        raise


def _handle_signals(handler: Callable[[int, FrameType | None], Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process: not by an exception, which an import may take for its own failure."""
    message = "interrupted"
    try:
        from extractor.core.log_line import asks_for_objects, log_line

        if asks_for_objects(sys.argv[1:], os.environ):
            message = log_line(message, event="error", level="error", exit_status=INTERRUPTED)
    except Exception:
        pass  # the signal came in the midst of importing these very modules
    try:
        os.write(2, f"{message}\n".encode())
    except OSError:
        pass  # nobody reads it
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

"""`extractor` and `python -m extractor`."""

from __future__ import annotations

# Few and small: until `main` runs, a signal ends the process in Python's own way.
import os
import signal

from extractor.core.own_packages import put_first

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130  # `errors.Interrupted.exit_code`, without its imports

# Here, so that worker processes do it, too: they import this module before anything else of ours.
put_first()


def main() -> NoReturn:
    """Run the command line. Its import takes a second, in which a signal ends the process, too."""
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
    """End the process, without an exception: an import may take one for its own failure."""
    try:
        os.write(2, b"interrupted\n")
    except OSError:
        pass  # nobody reads it
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

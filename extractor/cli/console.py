"""What commands write to people, and how they run: stdout is data, stderr is status."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import click

from extractor.cli.log import log_to_stderr
from extractor.core.errors import Interrupted
from extractor.core.log_line import log_line
from extractor.core.printable import printable, printable_json
from extractor.core.timings import DEFAULT_TIMINGS, StopTimings
from extractor.system.signals import handlers_put_back, under_signals

Result = TypeVar("Result")


class Console:
    """How this process writes to stderr, as far as its options are known."""

    writes_objects = False  # --log-json
    verbosity = 0  # -v: 1, -vv: 2

    def reset(self) -> None:
        """As before the first option is read."""
        self.writes_objects = False
        self.set_verbosity(0)

    def set_verbosity(self, verbosity: int) -> None:
        """Log from here on: nothing at 0, INFO at 1, DEBUG at 2."""
        self.verbosity = verbosity
        log_to_stderr(verbosity, as_objects=lambda: self.writes_objects)


console = Console()


def print_text(text: str, *, colours: Mapping[str, str] | None = None) -> None:
    """Print lines on stdout. `colours`: signs of ours -> what is printed in their place."""
    text = printable(text)
    for sign, coloured in (colours or {}).items():
        text = text.replace(sign, coloured)
    click.echo(text)


def print_json(document: dict[str, Any]) -> None:
    """Print a document on stdout."""
    click.echo(printable_json(document, is_indented=True))


def report(message: str) -> None:
    """On stderr, where somebody is still there to read it."""
    with suppress(OSError):
        click.echo(printable(message), err=True)


def report_usage_error(error: click.ClickException) -> None:
    """As click shows it: with the usage of the command."""
    shown = io.StringIO()
    error.show(shown)
    report(shown.getvalue().rstrip("\n"))


def report_defect(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Report the traceback of an error that is a defect of ours, for `sys.excepthook`."""
    report("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def report_error(
    message: str, *, exit_status: int, show: Callable[[], None] | None = None, **fields: object
) -> None:
    """Report what ends a command: as an object with `--log-json`, else by `show`, or in a line."""
    if console.writes_objects:
        report(log_line(message, event="error", level="error", exit_status=exit_status, **fields))
    elif show is not None:
        show()
    else:
        report(f"extractor: {message}")


def _end_process(timings: StopTimings) -> None:
    """Exit at once, without waiting for threads or children; as safe as SIGKILL."""
    message = (
        f"ended {timings.end_s:.0f} s after the signal, with work in progress; the same command "
        "repeats what was not durable yet"
    )
    # On a thread: whatever blocks the command may block the message, too.
    reporting = threading.Thread(
        target=report_error, args=(message,), kwargs={"exit_status": Interrupted.exit_code},
        daemon=True,
    )  # fmt: skip
    reporting.start()
    reporting.join(timings.log_s)
    os._exit(Interrupted.exit_code)


def run_async(
    coroutine: Coroutine[Any, Any, Result], *, timings: StopTimings = DEFAULT_TIMINGS.stop
) -> Result:
    """asyncio.run, ended in order by SIGINT, SIGTERM or SIGHUP: raises Interrupted."""
    leaving = threading.Timer(timings.threads_s, _leave_threads)
    leaving.daemon = True

    async def command() -> Result:
        try:
            return await coroutine
        except asyncio.CancelledError:
            leaving.start()
            raise

    try:
        with handlers_put_back():
            return asyncio.run(
                under_signals(command(), end=partial(_end_process, timings), end_s=timings.end_s)
            )
    except asyncio.CancelledError:
        raise Interrupted("interrupted") from None
    finally:
        leaving.cancel()


def _leave_threads() -> None:
    """End the process of a command that has cleaned up, though a thread still reads an idle input,
    scans a long file, loads a tokenizer or resolves a name."""
    report_error("interrupted", exit_status=Interrupted.exit_code)
    os._exit(Interrupted.exit_code)

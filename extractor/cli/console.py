"""What commands say, and how they run: stdout is data, stderr is status."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import click
import orjson

from extractor.core.errors import Interrupted
from extractor.core.log_line import asks_for_objects, log_line
from extractor.core.timings import DEFAULT_TIMINGS, StopTimings
from extractor.system.signals import handlers_put_back, under_signals

Result = TypeVar("Result")


def print_json(document: dict[str, Any]) -> None:
    """On stdout."""
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def report(message: str) -> None:
    """On stderr, where somebody is still there to read it."""
    with suppress(OSError):
        click.echo(message, err=True)


def tell_error(
    message: str, *, exit_status: int, otherwise: Callable[[], None], **fields: object
) -> None:
    """On stderr, what ends a command: as an object where `--log-json` asks for objects."""
    if asks_for_objects(sys.argv[1:], os.environ):
        report(log_line(message, event="error", level="error", exit_status=exit_status, **fields))
    else:
        otherwise()


def _end_process(timings: StopTimings) -> None:
    """Exit at once, without waiting for threads or children; as safe as SIGKILL."""
    code = Interrupted.exit_code
    message = (
        f"ended {timings.end_s:.0f} s after the signal, with work in progress; the same command "
        "repeats what was not durable yet"
    )

    def tell() -> None:
        tell_error(message, exit_status=code, otherwise=lambda: report(f"extractor: {message}"))

    # On a thread: whatever blocks the command may block the message, too.
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    teller.join(timings.log_s)
    os._exit(code)


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
    code = Interrupted.exit_code
    tell_error("interrupted", exit_status=code, otherwise=lambda: report("extractor: interrupted"))
    os._exit(code)

"""What commands say, and how they run: stdout is data, stderr is status."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import click
import orjson

from extractor.errors import Interrupted
from extractor.log_line import asks_for_objects, log_line
from extractor.signals import under_signals

Result = TypeVar("Result")


def print_json(document: dict[str, Any]) -> None:
    """On stdout."""
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def note(message: str) -> None:
    """On stderr, where somebody is still there to read it."""
    with suppress(OSError):
        click.echo(message, err=True)


def tell_error(
    message: str, *, exit_status: int, otherwise: Callable[[], None], **fields: object
) -> None:
    """On stderr, what ends a command: as an object where `--log-json` asks for objects."""
    if asks_for_objects(sys.argv[1:], os.environ):
        note(log_line(message, event="error", level="error", exit_status=exit_status, **fields))
    else:
        otherwise()


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run, ended in order by SIGINT, SIGTERM or SIGHUP: raises Interrupted."""
    try:
        return asyncio.run(under_signals(coroutine))
    except asyncio.CancelledError:
        raise Interrupted("interrupted") from None

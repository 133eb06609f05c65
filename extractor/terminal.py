"""What commands say, and how they run: stdout is data, stderr is status."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

import click
import orjson

from extractor.errors import Interrupted, exit_code, first_known
from extractor.progress import reporter_for
from extractor.signals import under_signals

Result = TypeVar("Result")


def print_json(document: dict[str, Any]) -> None:
    """On stdout."""
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def note(message: str) -> None:
    """On stderr."""
    click.echo(message, err=True)


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run, ended in order by SIGINT, SIGTERM or SIGHUP: raises Interrupted."""
    try:
        return asyncio.run(under_signals(coroutine))
    except asyncio.CancelledError:
        raise Interrupted("interrupted") from None


def with_reporter(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that has `--log-json` its `reporter`; as JSON, it tells the errors too."""

    @wraps(command)
    def wrapped(context: click.Context, /, *, log_json: bool, **values: Any) -> None:
        reporter = reporter_for(as_json=log_json)
        try:
            command(context, reporter=reporter, **values)
        except Exception as error:
            shown = first_known(error)
            code = exit_code(shown)
            if not log_json or code is None:
                raise  # told where the others are
            fields: dict[str, object] = {"exit_status": code}
            if context.find_root().params.get("verbose"):
                fields["traceback"] = traceback.format_exception(error)
            reporter.note(str(shown), event="error", level="error", **fields)
            sys.exit(code)

    return wrapped

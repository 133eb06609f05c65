"""`extractor serve`: a server with the plugin."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from extractor.cli.console import print_text, report, run_async
from extractor.cli.field_options import field_options, value_of
from extractor.cli.option_types import BYTES, PATH, TEXT
from extractor.cli.options import SGLANG_ARGUMENTS, PassingCommand
from extractor.core.errors import ServerError
from extractor.core.run_options import Servers
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.servers.launcher import free_port, running_server
from extractor.servers.sglang_flags import PRESETS, ServeOptions


@click.command("serve", cls=PassingCommand)
@click.option("--model", type=TEXT, required=True, metavar="PATH", help="Model folder or hub name.")
@click.option(
    "--host", type=TEXT, default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=30000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@field_options(Servers, "dump_root", "layers", "last_kind", "api_key_file")
@click.option(
    "--radix-cache/--no-radix-cache",
    default=False,
    show_default=True,
    help="Keep SGLang's prefix cache. Extraction isolates its requests from it anyway.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="none",
    show_default=True,
    help="multi-gpu: NCCL settings and flags for hosts where the start hangs.",
)
@click.option("--ring-bytes", type=BYTES, default=None, help="Staging memory of the plugin.")
@click.option(
    "--ring-slots", type=click.IntRange(2, 64), default=None, help="Parts of the staging memory."
)
@click.option(
    "--writers",
    "num_writers",
    type=click.IntRange(1, 64),
    default=None,
    help="Processes of the plugin that write dumps.",
)
@click.option(
    "--file-mode",
    type=TEXT,
    default=None,
    metavar="OCTAL",
    help="Permission bits of dumps, such as 660 for a client of another user.",
)
@click.option(
    "--log",
    "log_path",
    type=PATH,
    default=None,
    help="Where the server's output goes; only you can read it.  [default: a temporary file]",
)
@field_options(ServeOptions)
@click.pass_context
def serve_command(
    context: click.Context,
    /,
    host: str,
    port: int,
    **values: Any,
) -> None:
    """Start SGLang with the plugin; print its address on stdout when it is ready.

    Ends when the server does, or within 20 s of Ctrl-C or SIGTERM, which stop the server's whole
    process tree.
    """
    given = {
        **values,
        "host": host,
        "port": port or free_port(host),
        "arguments": context.meta[SGLANG_ARGUMENTS],
    }
    options = value_of(ServeOptions, given)
    timings = context.find_object(Timings) or DEFAULT_TIMINGS
    run_async(_serve(options, timings), timings=timings.stop)


async def _serve(options: ServeOptions, timings: Timings) -> NoReturn:
    async with running_server(options, report=report, timings=timings) as server:
        print_text(server.url)
        sys.stdout.flush()
        status = await server.process.wait()
        raise ServerError(
            f"the server ended with status {status}; the end of its log "
            f"({server.process.log_path}):\n{server.process.log_end()}"
        )

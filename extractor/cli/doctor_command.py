"""`extractor doctor`: is everything there that a run needs?"""

from __future__ import annotations

from typing import Any

import click

from extractor.cli.console import run_async
from extractor.cli.field_options import field_options
from extractor.cli.option_types import ADDRESS, PATH, SECONDS
from extractor.cli.options import Command
from extractor.core.address import DEFAULT_SERVER_URL, require_url
from extractor.core.errors import UsageError
from extractor.core.locations import DEFAULT_OUT
from extractor.core.run_options import Servers
from extractor.pipeline.doctor import examine


@click.command("doctor", cls=Command, short_help="Check server, plugin, disks and limits.")
@click.option(
    "--server",
    "urls",
    type=ADDRESS,
    multiple=True,
    metavar="URL",
    help=f"Address of the server.  [default: {DEFAULT_SERVER_URL}]",
)
@field_options(Servers, "dump_root", "dump_owner")
@click.option(
    "--out",
    type=PATH,
    default=DEFAULT_OUT,
    show_default=True,
    help="Directory that a run would write.",
)
@click.option(
    "--server-wait",
    "server_wait_s",
    type=SECONDS,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a server may take to come up.",
)
@click.option(
    "--clean",
    is_flag=True,
    help="Remove what dead servers left; dumps that a run could still adopt too.",
)
@click.pass_context
def doctor_command(context: click.Context, /, urls: tuple[str, ...], **values: Any) -> None:
    """Check server, plugin, layers, disks and limits: one OK or PROBLEM line each."""
    if len(urls) > 1:
        raise UsageError("doctor looks at one server at a time: run it once for each --server")
    (url,) = urls or (DEFAULT_SERVER_URL,)
    require_url(url)
    dumps = Servers(dump_root=values.pop("dump_root"), dump_owner=values.pop("dump_owner")).dumps
    if not run_async(_doctor(url=url, dump_root=dumps, **values)):
        context.exit(1)


async def _doctor(**values: Any) -> bool:
    is_well = True
    async for check in examine(**values):
        click.echo(str(check))
        is_well = is_well and check.problem is None
    return is_well

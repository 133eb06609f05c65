"""`extractor doctor`: is everything there that a run needs?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from extractor.config import DEFAULT_OUT, DEFAULT_SERVER_URL, require_url
from extractor.doctor import examine
from extractor.options import DUMP_DIR_OPTION, SERVER_HELP, seconds_option
from extractor.terminal import run_async


@click.command("doctor", short_help="Check server, plugin, disks and limits.")
@click.option(
    "--server",
    "url",
    default=DEFAULT_SERVER_URL,
    show_default=True,
    metavar="URL",
    help=SERVER_HELP,
)
@DUMP_DIR_OPTION
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_OUT,
    show_default=True,
    help="Directory that a run would write.",
)
@seconds_option("--server-wait", default=0.0, help="How long a server may take to come up.")
@click.option(
    "--clean",
    is_flag=True,
    help="Remove what dead servers left; dumps that a run could still adopt too.",
)
@click.pass_context
def doctor_command(context: click.Context, /, **values: Any) -> None:
    """Check server, plugin, layers, disks and limits: one OK or PROBLEM line each."""
    require_url(values["url"])
    if not run_async(_doctor(**values)):
        context.exit(1)


async def _doctor(**values: Any) -> bool:
    is_well = True
    async for check in examine(**values):
        click.echo(str(check))
        is_well = is_well and check.problem is None
    return is_well

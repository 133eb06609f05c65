"""`extractor show`: one row as the model will see it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from extractor.cli.console import print_json, print_text, run_async
from extractor.cli.field_options import field_options, value_of
from extractor.cli.option_types import ADDRESS
from extractor.cli.options import Command, prompts_argument
from extractor.cli.prompt_options import reading_options
from extractor.core.address import DEFAULT_SERVER_URL, require_url
from extractor.core.option import MAX_COUNT
from extractor.core.run_options import Input, Servers
from extractor.intake.prompt_stream import pool_for
from extractor.pipeline.show import COLOURS, server_tokenizer, show_row
from prompts.reading_options import ReadingOptions
from prompts.types import BadRow


@click.command("show", cls=Command)
@prompts_argument("paths")
@click.option(
    "--row",
    "number",
    type=click.IntRange(0, MAX_COUNT),
    default=0,
    show_default=True,
    help="Number of the row over all files, from 0: that of its sample.",
)
@field_options(Input, "tokenizer")
@click.option(
    "--server",
    "server_url",
    type=ADDRESS,
    default=DEFAULT_SERVER_URL,
    show_default=True,
    metavar="URL",
    help="Server whose tokenizer to use.",
)
@field_options(Servers, "api_key_file")
@reading_options
@click.option("--ids", is_flag=True, help="Print the token ids, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def show_command(
    context: click.Context,
    /,
    paths: tuple[Path, ...],
    number: int,
    tokenizer: str | None,
    server_url: str,
    api_key_file: Path | None,
    ids: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Show a row of PROMPTS as the model will see it, with the trained tokens marked ⟦so⟧.

    The exit status is 1 for a row that gives no prompt.
    """
    reading = value_of(ReadingOptions, values)
    require_url(server_url)
    if tokenizer is None:
        tokenizer = run_async(server_tokenizer(server_url, api_key_file=api_key_file))
    with pool_for(tokenizer, reading) as pool:
        shown = show_row(paths, pool, number)
    if as_json:
        print_json(shown.to_document())
    else:
        print_text(shown.to_text(ids=ids), colours=COLOURS if sys.stdout.isatty() else None)
    if isinstance(shown.item, BadRow):
        context.exit(1)

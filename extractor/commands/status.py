"""`extractor status`: how far a run is."""

from __future__ import annotations

from pathlib import Path

import click

from extractor.options import OUT_ARGUMENT
from extractor.report import totals_table
from extractor.status import failed_table, read_status
from extractor.terminal import print_json


@click.command("status")
@OUT_ARGUMENT
@click.option("--all", "all_failures", is_flag=True, help="List every failed row.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status_command(out: Path, all_failures: bool, as_json: bool) -> None:
    """Show how far the run in DIR is, and which rows failed and why."""
    status = read_status(out, all_failures=all_failures)
    if as_json:
        print_json(status.to_document())
        return
    identity = status.identity
    click.echo(
        f"{identity.model}: boundaries {list(identity.boundaries)}, last {identity.last_kind}, "
        f"{identity.dtype}"
    )
    click.echo(totals_table(status.totals, num_unread=status.num_unread))
    if status.failed:
        click.echo(failed_table(status))

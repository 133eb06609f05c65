"""`extractor status`: how far a run is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live as LiveDisplay

from extractor.cli.console import print_json, print_text
from extractor.cli.options import OUT_ARGUMENT, Command
from extractor.core.errors import UsageError
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.overview import failed_table, read_status
from extractor.status.page import line, page, standing
from extractor.status.report import totals_table
from extractor.status.watcher import watch


@click.command("status", cls=Command)
@OUT_ARGUMENT
@click.option("--all", "all_failures", is_flag=True, help="List every failed row.")
@click.option(
    "--watch",
    "is_watch",
    is_flag=True,
    help="Go on showing it until the run ends: live in a terminal, else a line every 30 s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status_command(out: Path, all_failures: bool, is_watch: bool, as_json: bool) -> None:
    """Show how far the run in DIR is, and which rows failed and why.

    It may be going on meanwhile, in another process of this host.
    """
    if is_watch:
        if as_json or all_failures:
            raise UsageError("--watch goes with neither --json nor --all")
        with suppress(KeyboardInterrupt):  # the usual way to leave
            _watch(out)
        return
    status = read_status(out, all_failures=all_failures)
    if as_json:
        print_json(status.to_document())
        return
    begun, identity = status.begun, status.begun.identity
    print_text(f"{out}: {standing(status.look)}")
    print_text(f"{identity.model.path}: {identity.capture_text}")
    live = status.look.live
    now = None if live is None else live.session["now"]
    print_text(totals_table(begun.totals, num_unread=begun.num_unread, now=now))
    if status.failed:
        print_text(failed_table(status))


def _watch(out: Path) -> None:
    console, timings = Console(markup=False, highlight=False), DEFAULT_TIMINGS.status
    if not console.is_terminal:
        watch(out, lambda look: print_text(line(look)), interval_s=timings.line_interval_s)
        return
    with LiveDisplay(console=console, auto_refresh=False, transient=False) as display:
        watch(
            out,
            lambda look: display.update(page(look), refresh=True),
            interval_s=timings.look_interval_s,
        )

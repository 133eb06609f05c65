"""`extractor verify`: the proof, and the repair of what fails it."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from tqdm import tqdm

from extractor.cli.console import print_json, print_text
from extractor.cli.options import OUT_ARGUMENT, Command
from extractor.core.errors import UsageError
from extractor.verify.audit import audit
from extractor.verify.repair import audit_and_repair


@click.command("verify", cls=Command)
@OUT_ARGUMENT
@click.option("--fast", is_flag=True, help="Leave out the states' bytes: digests, finiteness.")
@click.option(
    "--repair",
    is_flag=True,
    help="Replace damaged shards by their sound samples; the next run extracts the others again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify_command(
    context: click.Context, /, out: Path, fast: bool, repair: bool, as_json: bool
) -> None:
    """Prove the data set in DIR from its shards and manifest alone."""
    if fast and repair:
        raise UsageError("--repair has to read every byte: leave --fast out")
    repaired = None
    with tqdm(unit=" samples", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        if repair:
            result, repaired = audit_and_repair(out, progress=advance)
        else:
            result = audit(out, fast=fast, progress=advance)
    if as_json:
        extra = {} if repaired is None else {"repair": repaired.to_document()}
        print_json({**result.to_document(), **extra})
    else:
        print_text(result.to_text())
        if repaired is not None:
            print_text(repaired.to_text())
    if not result.is_clean:
        context.exit(1)

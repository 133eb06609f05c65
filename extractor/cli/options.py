"""What the commands have in common: shared options, commands that pass words on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from extractor.cli.option_types import Address, ByteSize, Concurrency, GivenPath, Seconds, Text
from extractor.core.locations import DEFAULT_DUMP_ROOT, DEFAULT_OUT
from extractor.servers.sglang_flags import DEFAULT_LAST_KIND, DEFAULT_LAYERS

_Command = TypeVar("_Command", bound=Callable[..., Any])


class PassingCommand(click.Command):
    """A command whose words after `--` go to SGLang as they are: `ctx.meta[SGLANG_ARGUMENTS]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[SGLANG_ARGUMENTS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SGLANG ARGS]"]


class Commands(click.Group):
    """Commands whose every option has a variable, named after the option as it is written."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        for parameter in cmd.params:
            if isinstance(parameter, click.Option):
                option = parameter.opts[-1].removeprefix("--")
                parameter.envvar = f"EXTRACTOR_{cmd.name}_{option}".replace("-", "_").upper()
        super().add_command(cmd, name)


SGLANG_ARGUMENTS = "extractor.sglang_arguments"
BYTES = ByteSize()
ADDRESS = Address()
CONCURRENCY = Concurrency()
PATH = GivenPath(path_type=Path)
TEXT = Text()
SECONDS = Seconds()
OUT_ARGUMENT = click.argument("out", metavar="[DIR]", type=PATH, default=DEFAULT_OUT)
SERVER_HELP = "Address of the server."
DUMP_DIR_OPTION = click.option(
    "--dump-dir",
    "dump_root",
    type=PATH,
    default=DEFAULT_DUMP_ROOT,
    show_default=True,
    help="Where the server's plugin puts its dumps.",
)
LAYERS_OPTION = click.option(
    "--layers",
    type=TEXT,
    default=None,
    show_default=DEFAULT_LAYERS,
    metavar="LIST",
    help="Boundaries to capture: eagle3, or indices such as 3,31,59. "
    "Index b is the residual stream entering layer b.",
)
LAST_OPTION = click.option(
    "--last",
    "last_kind",
    type=click.Choice(["post", "pre", "both"]),
    default=None,
    show_default=DEFAULT_LAST_KIND,
    help="Last state to keep: after the final norm, before it, or both.",
)
TOKENIZER_OPTION = click.option(
    "--tokenizer",
    type=TEXT,
    default=None,
    metavar="PATH",
    help="Tokenizer to render with, or none for rows of ids only.  [default: the server's]",
)


def seconds_option(name: str, *, default: float, help: str) -> Callable[[_Command], _Command]:
    """An option --what-ever, handed on as `what_ever_s`."""
    return click.option(
        name,
        f"{name.removeprefix('--').replace('-', '_')}_s",
        type=SECONDS,
        default=default,
        show_default=True,
        metavar="SECONDS",
        help=help,
    )

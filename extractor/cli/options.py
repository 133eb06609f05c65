"""What the commands have in common: shared options, and where the values of options come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from extractor.cli.console import console
from extractor.cli.option_types import PATH, VERBOSITY
from extractor.core.locations import DEFAULT_OUT

Function = TypeVar("Function", bound=Callable[..., Any])

SGLANG_ARGUMENTS = "extractor.sglang_arguments"


class Command(click.Command):
    """A command whose options `-v` and `--log-json` count in its usage errors, too."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        # Click parses all options before it processes one, so that the first that is wrong hides
        # the others. The ones that say how errors are shown are parsed by themselves before.
        shown = click.Command(
            self.name,
            params=[param for param in self.params if param.is_eager],
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            add_help_option=False,
        )
        with suppress(click.UsageError):
            shown.make_context(info_name, list(args), parent)
        return super().make_context(info_name, args, parent, **extra)


class PassingCommand(Command):
    """A command whose words after `--` go to SGLang as they are: `ctx.meta[SGLANG_ARGUMENTS]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[SGLANG_ARGUMENTS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SGLANG ARGS]"]


class Commands(click.Group):
    """Commands whose every option has a variable, named after the option as it is written."""

    command_class = Command

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(verbose_option())
        for parameter in cmd.params:
            if isinstance(parameter, click.Option):
                option = parameter.opts[-1].removeprefix("--")
                parameter.envvar = f"EXTRACTOR_{cmd.name}_{option}".replace("-", "_").upper()
        super().add_command(cmd, name)


def verbose_option() -> click.Option:
    """`-v`, for `extractor` itself and for each command: the higher of the two counts."""

    def set_verbosity(_: click.Context, __: click.Parameter, count: int) -> None:
        console.set_verbosity(max(count, console.verbosity))

    return click.Option(
        ["-v", "--verbose"],
        count=True,
        type=VERBOSITY,
        is_eager=True,
        expose_value=False,
        show_default=False,
        callback=set_verbosity,
        help="Log what happens, and show a traceback with every error; -vv logs each prompt, too.",
    )


def _write_objects(_: click.Context, __: click.Parameter, value: bool) -> bool:
    console.writes_objects = value
    return value


LOG_JSON_OPTION = click.option(
    "--log-json",
    is_flag=True,
    is_eager=True,
    callback=_write_objects,
    help="Write what goes to stderr as JSON, one object a line.",
)
OUT_ARGUMENT = click.argument("out", metavar="[DIR]", type=PATH, default=DEFAULT_OUT)


def prompts_argument(name: str) -> Callable[[Function], Function]:
    """The prompt files of a command, handed on as `name`."""
    return click.argument(name, metavar="PROMPTS...", nargs=-1, required=True, type=PATH)

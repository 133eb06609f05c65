"""The command line: the only place that prints or exits.

stdout is data, stderr is status. Exit: 0 done and clean, 1 findings or failed rows, 2 usage or
configuration, 3 server trouble (rows stay resumable), 4 no space, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import orjson
from tqdm import tqdm

from extractor import __version__
from extractor.audit import audit
from extractor.config import (
    DEFAULT_OUT,
    DEFAULT_SERVER_URL,
    DEFAULT_SHARD_BYTES,
    RunOptions,
    require_url,
)
from extractor.doctor import examine
from extractor.dry_run import dry_run as dry_run_of
from extractor.engine import DEFAULT_LAST_KIND, DEFAULT_LAYERS, PRESETS, ServeOptions
from extractor.errors import Interrupted, ServerError, UsageError, exit_code, first_known
from extractor.options import (
    BYTES,
    DUMP_DIR_OPTION,
    LAST_OPTION,
    LAYERS_OPTION,
    OUT_ARGUMENT,
    SERVER_HELP,
    SGLANG_ARGUMENTS,
    Commands,
    PassingCommand,
)
from extractor.progress import reporter_for
from extractor.prompt_options import (
    policy_from,
    policy_options,
    reading_from,
    reading_options,
)
from extractor.repair import audit_and_repair
from extractor.report import totals_table
from extractor.run import RunSummary, run
from extractor.serve import free_port, running_server, server_answers
from extractor.show import renderer_for, server_tokenizer, show_row
from extractor.signals import under_signals
from extractor.status import failed_table, read_status

Result = TypeVar("Result")


@click.group(
    cls=Commands,
    context_settings={
        "auto_envvar_prefix": "EXTRACTOR",
        "show_default": True,
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__, prog_name="extractor")
@click.option("-v", "--verbose", is_flag=True, help="Show a traceback with every error.")
def cli(verbose: bool) -> None:
    """Hidden states of a large model, for every token of many prompts, out of a SGLang server.

    Every option can be set by a variable: EXTRACTOR_RUN_OUT for `extractor run --out`.

    Exit status: 0 done and clean, 1 findings or failed rows, 2 usage or configuration,
    3 server trouble (the same command resumes), 4 no space, 130 interrupted.
    """


@cli.command("run", cls=PassingCommand)
@click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_OUT,
    show_default=True,
    help="Directory of the data set. An unfinished one is resumed.",
)
@click.option(
    "--server",
    "server_url",
    default=None,
    metavar="URL",
    help=f"{SERVER_HELP}  [default: {DEFAULT_SERVER_URL}]",
)
@click.option(
    "--model",
    default=None,
    metavar="PATH",
    help="When no server answers, start one with this model and stop it at the end. "
    "SGLang's own arguments go after --.",
)
@DUMP_DIR_OPTION
@LAYERS_OPTION
@LAST_OPTION
@click.option(
    "--tokenizer",
    default=None,
    metavar="PATH",
    help="Tokenizer to render with, or none for rows of ids only.  [default: the server's]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--shm-budget",
    "shm_budget_bytes",
    type=BYTES,
    default=None,
    help="Most bytes of dumps at a time.  [default: half of what is free]",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    type=BYTES,
    default=DEFAULT_SHARD_BYTES,
    show_default="4GiB",
    help="A shard is sealed before it grows beyond this.",
)
@click.option(
    "--movers",
    "num_movers",
    type=click.IntRange(min=1),
    default=None,
    help="Threads that copy dumps to shards.  [default: a quarter of the cores, 1 to 8]",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Requests for one prompt before it is given up.",
)
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=float,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="From sending a prompt to its answer.",
)
@click.option(
    "--dump-timeout",
    "dump_timeout_s",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="From the answer to the last piece of the dump.",
)
@click.option(
    "--server-wait",
    "server_wait_s",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a server may take to come up, or to come back when it dies.",
)
@click.option(
    "--retry-failed", is_flag=True, help="Try again the rows that an earlier session gave up."
)
@reading_options
@policy_options
@click.option(
    "--tokenizer-workers",
    type=click.IntRange(min=0),
    default=None,
    help="Processes that tokenise; 0 for none.  [default: a quarter of the cores, 1 to 8, for "
    "5,000 rows and more]",
)
@click.option(
    "--dry-run", is_flag=True, help="Tokenise and count; tell bytes, files, time; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def run_command(
    context: click.Context,
    /,
    prompts: tuple[Path, ...],
    server_url: str | None,
    model: str | None,
    layers: str | None,
    last_kind: str | None,
    num_movers: int | None,
    dry_run: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Extract the hidden states of PROMPTS. The same command again resumes.

    PROMPTS are files of JSONL, a JSON array, Parquet or Arrow, perhaps in gzip or zstd, told by
    their content; patterns; directories of Hugging Face data sets; or - for standard input.
    """
    arguments: tuple[str, ...] = context.meta[SGLANG_ARGUMENTS]
    options = RunOptions(
        prompts=prompts,
        server_url=DEFAULT_SERVER_URL if server_url is None else server_url,
        model=model,
        layers=layers,
        last_kind=last_kind,
        num_movers=num_movers or min(8, max(1, (os.cpu_count() or 1) // 4)),
        reading=reading_from(values),
        policy=policy_from(values),
        **values,
    )
    if dry_run:
        result = _run_async(dry_run_of(options, reporter_for()))
        if as_json:
            _print_json(result.to_document())
        else:
            click.echo(result.to_text())
        return
    serve_options = None
    if model is not None:
        serve_options = ServeOptions(
            model=model,
            port=free_port(),
            dump_root=options.dump_root,
            layers=layers or DEFAULT_LAYERS,
            last_kind=last_kind or DEFAULT_LAST_KIND,
            arguments=arguments,
        )
    elif arguments:
        raise UsageError("arguments after -- are for a server that --model starts")
    summary = _run_async(_run(options, serve_options, is_named=server_url is not None))
    if as_json:
        _print_json(summary.to_document(options.out))
    else:
        click.echo(summary.to_text(options.out))
    if summary.num_failed:
        context.exit(1)


async def _run(
    options: RunOptions, serve_options: ServeOptions | None, *, is_named: bool
) -> RunSummary:
    reporter = reporter_for()
    if serve_options is None or await server_answers(options.server_url):
        return await run(options, reporter)
    if is_named:
        reporter.note(f"no server answers at {options.server_url}; starting one of our own")
    async with running_server(serve_options, note=reporter.note) as server:
        return await run(options.with_server(server.url), reporter)


@cli.command("show")
@click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--row",
    "number",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of the row over all files, from 0: that of its sample.",
)
@click.option(
    "--tokenizer",
    default=None,
    metavar="PATH",
    help="Tokenizer to render with, or none for rows of ids only.  [default: the server's]",
)
@click.option(
    "--server",
    "server_url",
    default=DEFAULT_SERVER_URL,
    show_default=True,
    metavar="URL",
    help="Server whose tokenizer to use.",
)
@reading_options
@click.option("--ids", is_flag=True, help="Print the token ids, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def show_command(
    prompts: tuple[Path, ...],
    number: int,
    tokenizer: str | None,
    server_url: str,
    ids: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Show a row of PROMPTS as the model will see it, with the trained tokens marked ⟦so⟧."""
    reading = reading_from(values)
    require_url(server_url)
    if tokenizer is None:
        tokenizer = _run_async(server_tokenizer(server_url))
    shown = show_row(prompts, renderer_for(tokenizer, reading), number)
    if as_json:
        _print_json(shown.to_document())
    else:
        click.echo(shown.to_text(colours=sys.stdout.isatty(), ids=ids))


@cli.command("serve", cls=PassingCommand)
@click.option("--model", required=True, metavar="PATH", help="Model folder or hub name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=30000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@DUMP_DIR_OPTION
@LAYERS_OPTION
@LAST_OPTION
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
@click.option("--ring-slots", type=int, default=None, help="Parts of the staging memory.")
@click.option(
    "--writers",
    "num_writers",
    type=int,
    default=None,
    help="Processes of the plugin that write dumps.",
)
@click.option(
    "--file-mode",
    default=None,
    metavar="OCTAL",
    help="Permission bits of dumps, such as 660 for a client of another user.",
)
@click.option(
    "--log",
    "log_path",
    type=click.Path(path_type=Path),
    default=None,
    help="Where the server's output goes.  [default: a temporary file]",
)
@click.option(
    "--stall",
    "stall_s",
    type=float,
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Silence after which a stall is reported.",
)
@click.pass_context
def serve_command(
    context: click.Context,
    /,
    port: int,
    layers: str | None,
    last_kind: str | None,
    **values: Any,
) -> None:
    """Start SGLang with the plugin; print its address on stdout when it is ready.

    Ends when the server does, or with Ctrl-C, which stops the server's whole process tree.
    """
    options = ServeOptions(
        port=port or free_port(),
        layers=layers or DEFAULT_LAYERS,
        last_kind=last_kind or DEFAULT_LAST_KIND,
        arguments=context.meta[SGLANG_ARGUMENTS],
        **values,
    )
    _run_async(_serve(options))


async def _serve(options: ServeOptions) -> NoReturn:
    async with running_server(options, note=_note) as server:
        click.echo(server.url)
        sys.stdout.flush()
        status = await server.process.wait()
        raise ServerError(
            f"the server ended with status {status}; the end of its log "
            f"({server.process.log_path}):\n{server.process.log_text(tail_bytes=4096)}"
        )


@cli.command("verify")
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
        _print_json({**result.to_document(), **extra})
    else:
        click.echo(result.to_text())
        if repaired is not None:
            click.echo(repaired.to_text())
    if not result.is_clean:
        context.exit(1)


@cli.command("status")
@OUT_ARGUMENT
@click.option("--all", "all_failures", is_flag=True, help="List every failed row.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status_command(out: Path, all_failures: bool, as_json: bool) -> None:
    """Show how far the run in DIR is, and which rows failed and why."""
    status = read_status(out, all_failures=all_failures)
    if as_json:
        _print_json(status.to_document())
        return
    identity = status.identity
    click.echo(
        f"{identity.model}: boundaries {list(identity.boundaries)}, last {identity.last_kind}, "
        f"{identity.dtype}"
    )
    click.echo(totals_table(status.totals, num_unread=status.num_unread))
    if status.failed:
        click.echo(failed_table(status))


@cli.command("doctor", short_help="Check server, plugin, disks and limits.")
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
@click.option(
    "--server-wait",
    "server_wait_s",
    type=float,
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
def doctor_command(context: click.Context, /, **values: Any) -> None:
    """Check server, plugin, layers, disks and limits: one OK or PROBLEM line each."""
    require_url(values["url"])
    if not _run_async(_doctor(**values)):
        context.exit(1)


async def _doctor(**values: Any) -> bool:
    is_well = True
    async for check in examine(**values):
        click.echo(str(check))
        is_well = is_well and check.problem is None
    return is_well


def _print_json(document: dict[str, Any]) -> None:
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def _note(message: str) -> None:
    click.echo(message, err=True)


def _run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run, ended in order by SIGINT, SIGTERM or SIGHUP: raises Interrupted."""
    try:
        return asyncio.run(under_signals(coroutine))
    except asyncio.CancelledError:
        raise Interrupted("interrupted") from None


def main() -> NoReturn:
    """Entry point of `extractor`: errors as messages on stderr, and the exit status."""
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:2]))
    try:
        # Not standalone, click returns what `context.exit` was given instead of exiting.
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _note("interrupted")
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        # The reader of our output went away, as `head` does: not our error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except BaseException as error:
        shown = first_known(error)
        code = exit_code(shown)
        if code is None:
            raise  # a defect: the traceback is the report
        if verbose:
            traceback.print_exception(error)
        _note(f"extractor: {shown}")
        sys.exit(code)
    sys.exit(status or 0)

"""`extractor run`: the main job, and its dry run."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import click

from extractor.cli.console import print_json, print_text, run_async
from extractor.cli.field_options import field_options, value_of
from extractor.cli.option_types import TEXT
from extractor.cli.options import (
    LOG_JSON_OPTION,
    SGLANG_ARGUMENTS,
    PassingCommand,
    prompts_argument,
)
from extractor.cli.prompt_options import reading_options
from extractor.core.errors import UsageError
from extractor.core.events import Reporter
from extractor.core.row_policy import Policy
from extractor.core.run_options import Input, Load, Output, Patience, RunOptions, Servers
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.pipeline.dry_run import dry_run as dry_run_of
from extractor.pipeline.run import run
from extractor.pipeline.summary import RunSummary
from extractor.servers.launcher import any_server_answers, free_port, running_server
from extractor.servers.sglang_flags import ServeOptions
from extractor.status.prometheus import DEFAULT_HOST, Metrics, served_metrics
from extractor.status.reporters import Together, reporter_for


@click.command("run", cls=PassingCommand)
@prompts_argument("paths")
@field_options(Output)
@field_options(Servers)
@field_options(Load)
@field_options(Patience)
@field_options(RunOptions)
@reading_options
@field_options(Policy)
@field_options(Input, "tokenizer", "tokenizer_workers")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Tokenise and count; estimate size, file count and duration; write nothing.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(min=0, max=65535),
    default=None,
    help="Serve the run's numbers to Prometheus on this port; 0 takes a free one. Extra metrics.",
)
@click.option(
    "--metrics-host",
    type=TEXT,
    default=None,
    show_default=DEFAULT_HOST,
    help="The address to serve them at. Whoever reaches it can read them.",
)
@LOG_JSON_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def run_command(
    context: click.Context,
    /,
    dry_run: bool,
    metrics_port: int | None,
    metrics_host: str | None,
    as_json: bool,
    log_json: bool,
    **values: Any,
) -> None:
    """Extract the hidden states of PROMPTS. The same command again resumes.

    PROMPTS are files of JSONL, a JSON array, Parquet or Arrow, perhaps in gzip or zstd, whose type
    is detected from their content; patterns; directories of Hugging Face data sets; or - for
    standard input.
    """
    timings = context.find_object(Timings) or DEFAULT_TIMINGS
    reporter: Reporter = reporter_for(as_json=log_json)
    if metrics_host is not None and metrics_port is None:
        raise UsageError(
            "--metrics-host without --metrics-port serves nothing: name a port (0 takes a free one)"
        )
    options = value_of(RunOptions, values)
    if dry_run:
        work = dry_run_of(options, reporter, timings=timings)
        result = run_async(work, timings=timings.stop)
        if as_json:
            print_json(result.to_document())
        else:
            print_text(result.to_text())
        return
    serve_options = None
    arguments = context.meta[SGLANG_ARGUMENTS]
    if options.servers.model is not None:
        # Its dumps are read by this user: --file-mode is of the data set.
        own = {**values, "file_mode": None, "port": free_port(), "arguments": arguments}
        serve_options = value_of(ServeOptions, own)
    elif arguments:
        raise UsageError("arguments after -- are for a server that --model starts")
    with ExitStack() as stack:
        if metrics_port is not None:
            metrics = Metrics()
            url = stack.enter_context(
                served_metrics(metrics, port=metrics_port, host=metrics_host or DEFAULT_HOST)
            )
            reporter.report(f"metrics at {url}")
            reporter = Together(reporter, metrics)
        # Half a million objects of imported modules: each full collection would visit them.
        gc.freeze()
        is_named = bool(values["urls"])
        extraction = _run(options, serve_options, reporter, timings, is_named=is_named)
        summary = run_async(extraction, timings=timings.stop)
    status = 1 if summary.num_failed else 0
    document = summary.to_document(options.output.directory)
    if log_json:
        # For programs only: a person reads the summary.
        reporter.report("finished", event="finished", exit_status=status, **document)
    if as_json:
        print_json(document)
    else:
        print_text(summary.to_text(options.output.directory))
    context.exit(status)


async def _run(
    options: RunOptions,
    serve_options: ServeOptions | None,
    reporter: Reporter,
    timings: Timings,
    *,
    is_named: bool,
) -> RunSummary:
    if serve_options is None or await any_server_answers(
        options.servers.urls, api_key_file=options.servers.api_key_file
    ):
        return await run(options, reporter, timings=timings)
    if is_named:
        reporter.report(
            f"no server answers at {', '.join(options.servers.urls)}; starting one of our own"
        )
    async with running_server(serve_options, report=reporter.report, timings=timings) as server:
        return await run(options.with_server(server.url), reporter, timings=timings)

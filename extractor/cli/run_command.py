"""`extractor run`: the main job, and its dry run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from extractor.cli.console import print_json, run_async
from extractor.cli.option_types import AUTO
from extractor.cli.options import (
    ADDRESS,
    BYTES,
    CONCURRENCY,
    DUMP_DIR_OPTION,
    LAST_OPTION,
    LAYERS_OPTION,
    PATH,
    SERVER_HELP,
    SGLANG_ARGUMENTS,
    TEXT,
    TOKENIZER_OPTION,
    PassingCommand,
    seconds_option,
)
from extractor.cli.prompt_options import policy_from, policy_options, reading_from, reading_options
from extractor.core.address import DEFAULT_SERVER_URL
from extractor.core.bounds import MAX_COUNT, MAX_MOVERS, MAX_TOKENIZER_WORKERS
from extractor.core.errors import UsageError
from extractor.core.events import Reporter
from extractor.core.locations import DEFAULT_OUT
from extractor.core.run_options import (
    DEFAULT_SHARD_BYTES,
    Input,
    Load,
    Output,
    Patience,
    RunOptions,
    Servers,
)
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.pipeline.dry_run import dry_run as dry_run_of
from extractor.pipeline.run import run
from extractor.pipeline.summary import RunSummary
from extractor.servers.launcher import any_server_answers, free_port, running_server
from extractor.servers.sglang_flags import (
    DEFAULT_LAST_KIND,
    DEFAULT_LAYERS,
    EngineOptions,
    PluginOptions,
    ServeOptions,
)
from extractor.status.prometheus import DEFAULT_HOST, Metrics, MetricsServer
from extractor.status.reporters import Together, reporter_for


@click.command("run", cls=PassingCommand)
@click.argument("prompts", nargs=-1, required=True, type=PATH)
@click.option(
    "--out",
    type=PATH,
    default=DEFAULT_OUT,
    show_default=True,
    help="Directory of the data set. An unfinished one is resumed.",
)
@click.option(
    "--server",
    "server_urls",
    type=ADDRESS,
    multiple=True,
    metavar="URL",
    help=f"{SERVER_HELP} Again for each further one: all must capture the same, and dump under "
    "the same --dump-dir. Those that do not answer are left out until they do.  "
    f"[default: {DEFAULT_SERVER_URL}]",
)
@click.option(
    "--model",
    type=TEXT,
    default=None,
    metavar="PATH",
    help="When no server answers, start one with this model and stop it at the end. "
    "SGLang's own arguments go after --.",
)
@DUMP_DIR_OPTION
@LAYERS_OPTION
@LAST_OPTION
@TOKENIZER_OPTION
@click.option(
    "--concurrency",
    type=CONCURRENCY,
    default=AUTO,
    show_default=True,
    metavar="N|auto",
    help="Maximum requests in flight with each server; auto: as many as it reports to run and "
    "queue, at most 512.",
)
@click.option(
    "--shm-budget",
    "shm_budget_bytes",
    type=BYTES,
    default=None,
    help="Most bytes of dumps at a time.  [default: half of what is free and within the server's "
    "memory limits]",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    type=BYTES,
    default=DEFAULT_SHARD_BYTES,
    show_default="4GiB",
    help="A shard is sealed before it grows beyond this, or its header beyond 16 MiB.",
)
@click.option(
    "--movers",
    "num_movers",
    type=click.IntRange(1, MAX_MOVERS),
    default=None,
    help="Threads that copy dumps to shards.  [default: a quarter of the cores, 2 to 8]",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, MAX_COUNT),
    default=4,
    show_default=True,
    help="Requests for one prompt before it is given up.",
)
@seconds_option(
    "--request-timeout", default=600.0, help="From sending a prompt to its complete reply."
)
@seconds_option(
    "--dump-timeout", default=60.0, help="From the answer to the last piece of the dump."
)
@seconds_option(
    "--server-wait",
    default=0.0,
    help="How long to wait for a server: at the start until one is up, and when none is left.",
)
@click.option(
    "--retry-failed", is_flag=True, help="Try again the rows that an earlier session gave up."
)
@click.option(
    "--allow-model-change",
    is_flag=True,
    help="Continue a data set although the server now computes different states: other weights, "
    "KV-cache dtype, quantization. Its rows are stored beside the old ones; dataset.json and the "
    "manifest record which server start computed each row.",
)
@reading_options
@policy_options
@click.option(
    "--tokenizer-workers",
    type=click.IntRange(0, MAX_TOKENIZER_WORKERS),
    default=None,
    help="Processes that tokenise; 0 for none.  [default: a quarter of the cores, 1 to 8, for "
    "5,000 rows and more]",
)
@click.option(
    "--dry-run", is_flag=True, help="Tokenise and count; tell bytes, files, time; write nothing."
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
@click.option(
    "--log-json", is_flag=True, help="Write what goes to stderr as JSON, one object a line."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def run_command(
    context: click.Context,
    /,
    prompts: tuple[Path, ...],
    server_urls: tuple[str, ...],
    model: str | None,
    layers: str | None,
    last_kind: str | None,
    num_movers: int | None,
    dry_run: bool,
    metrics_port: int | None,
    metrics_host: str | None,
    as_json: bool,
    log_json: bool,
    **values: Any,
) -> None:
    """Extract the hidden states of PROMPTS. The same command again resumes.

    PROMPTS are files of JSONL, a JSON array, Parquet or Arrow, perhaps in gzip or zstd, told by
    their content; patterns; directories of Hugging Face data sets; or - for standard input.
    """
    timings = context.find_object(Timings) or DEFAULT_TIMINGS
    reporter: Reporter = reporter_for(as_json=log_json)
    if metrics_host is not None and metrics_port is None:
        raise UsageError(
            "--metrics-host without --metrics-port serves nothing: name a port (0 takes a free one)"
        )
    arguments: tuple[str, ...] = context.meta[SGLANG_ARGUMENTS]
    options = RunOptions(
        input=Input(
            paths=prompts,
            reading=reading_from(values),
            policy=policy_from(values),
            tokenizer=values["tokenizer"],
            tokenizer_workers=values["tokenizer_workers"],
        ),
        output=Output(directory=values["out"], shard_bytes=values["shard_bytes"]),
        servers=Servers(
            urls=server_urls or (DEFAULT_SERVER_URL,),
            dump_root=values["dump_root"],
            model=model,
            layers=layers,
            last_kind=last_kind,
        ),
        load=Load(
            concurrency=values["concurrency"],
            shm_budget_bytes=values["shm_budget_bytes"],
            num_movers=num_movers or min(8, max(2, (os.cpu_count() or 1) // 4)),
        ),
        patience=Patience(**{field.name: values[field.name] for field in fields(Patience)}),
        retry_failed=values["retry_failed"],
        allow_model_change=values["allow_model_change"],
    )
    if dry_run:
        work = dry_run_of(options, reporter, timings=timings)
        result = run_async(work, timings=timings.stop)
        if as_json:
            print_json(result.to_document())
        else:
            click.echo(result.to_text())
        return
    serve_options = None
    if model is not None:
        serve_options = ServeOptions(
            engine=EngineOptions(model=model, port=free_port(), arguments=arguments),
            plugin=PluginOptions(
                dump_root=options.servers.dump_root,
                layers=layers or DEFAULT_LAYERS,
                last_kind=last_kind or DEFAULT_LAST_KIND,
            ),
        )
    elif arguments:
        raise UsageError("arguments after -- are for a server that --model starts")
    with ExitStack() as stack:
        if metrics_port is not None:
            metrics = Metrics()
            server = stack.enter_context(
                MetricsServer(metrics, port=metrics_port, host=metrics_host or DEFAULT_HOST)
            )
            reporter.report(f"metrics at {server.url}")
            reporter = Together(reporter, metrics)
        summary = run_async(
            _run(options, serve_options, reporter, timings, is_named=bool(server_urls)),
            timings=timings.stop,
        )
    status = 1 if summary.num_failed else 0
    document = summary.to_document(options.output.directory)
    if log_json:
        # For programs only: a person reads the summary.
        reporter.report("finished", event="finished", exit_status=status, **document)
    if as_json:
        print_json(document)
    else:
        click.echo(summary.to_text(options.output.directory))
    context.exit(status)


async def _run(
    options: RunOptions,
    serve_options: ServeOptions | None,
    reporter: Reporter,
    timings: Timings,
    *,
    is_named: bool,
) -> RunSummary:
    if serve_options is None or await any_server_answers(options.servers.urls):
        return await run(options, reporter, timings=timings)
    if is_named:
        reporter.report(
            f"no server answers at {', '.join(options.servers.urls)}; starting one of our own"
        )
    async with running_server(serve_options, report=reporter.report, timings=timings) as server:
        return await run(options.with_server(server.url), reporter, timings=timings)

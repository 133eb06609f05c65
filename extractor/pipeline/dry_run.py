"""Predicts a run without writing anything, for `extractor run --dry-run`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from extractor.core.admission import Admission, Room
from extractor.core.errors import BadDumpDir, PluginError, ServerUnreachable, UsageError
from extractor.core.events import Reporter
from extractor.core.humanize import counted
from extractor.core.request import Limits
from extractor.core.run_options import RunOptions
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.dispatch.budget import max_prompts
from extractor.dispatch.limiter import MAX_DEFAULT_LIMIT
from extractor.dispatch.server import require_connections
from extractor.intake.prompt_files import scan_prompts
from extractor.intake.prompt_stream import in_thread, num_workers_for, pool_of_run, prompts_of
from extractor.pipeline.forecast import DryRun, Forecast
from extractor.pipeline.speed_probe import measured_speed
from extractor.servers.client import Client, clients_of
from extractor.servers.sglang_flags import DEFAULT_LAST_KIND, DEFAULT_LAYERS, boundaries_of
from extractor.servers.shm_budget import shm_budget
from extractor.servers.target import Target, require_targets
from extractor.status.watcher import Watcher
from extractor.system.files import free_bytes, nearest_existing
from manifest.exceptions import ManifestMissing
from prompts.paths import Spool
from server_patch.dump_format import DumpFormatError, StateLayout

#: Requests in flight with each server while its speed is measured, if --concurrency is not given.
PROBE_CONCURRENCY = 64
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """The properties of the server, or of the model where there is no server."""

    tokenizer: str
    limits: Limits | None = None
    layout: StateLayout | None = None
    targets: tuple[Target, ...] = ()
    why_no_speed: str = ""


async def dry_run(
    options: RunOptions, reporter: Reporter, *, timings: Timings = DEFAULT_TIMINGS
) -> DryRun:
    """Tokenise every row and count. Sends a few prompts to the server, if one answers, to measure
    its speed; writes nothing.

    Raises InputError, TokenizerError, UsageError, ConfigMismatch.
    """
    require_connections(options.load.concurrency, num_servers=len(options.servers.urls))
    out = options.output.directory
    if settled := _settled_in(out):
        reporter.report(
            f"{out} has {counted(settled, 'row')} settled already, and a run leaves them as they "
            "are; what follows is of all rows"
        )
    async with clients_of(
        options, default_concurrency=PROBE_CONCURRENCY, timings=timings.client
    ) as clients:
        around = await _surroundings(options, clients, reporter)
        forecast = await _forecast(options, around, reporter, timings)
        speed = None
        if around.targets and forecast.sample.prompts:
            answering = {target.url for target in around.targets}
            speed = await measured_speed(
                [client for client in clients if client.url in answering],
                forecast.sample.prompts,
                options.load.concurrency or PROBE_CONCURRENCY,
                probe_s=timings.probe.speed_s,
            )
    return DryRun(
        forecast=forecast,
        speed=speed,
        why_no_speed=around.why_no_speed or "no prompt could be sent.",
        free_bytes=free_bytes(nearest_existing(out)),
    )


def _settled_in(out: Path) -> int:
    """Rows that earlier sessions stored or gave up; 0 where there is no run."""
    with suppress(ManifestMissing, UsageError):
        begun = Watcher(out).look().begun
        return 0 if begun is None else begun.num_settled
    return 0


async def _surroundings(
    options: RunOptions, clients: Sequence[Client], reporter: Reporter
) -> _Surroundings:
    try:
        found = await require_targets(clients, options, report=reporter.report)
    except ServerUnreachable:
        return _without_server(options)
    except (PluginError, BadDumpDir) as error:
        return _Surroundings(tokenizer=await _tokenizer(options, clients), why_no_speed=str(error))
    targets = tuple(target for target in found if target is not None)
    return _Surroundings(
        tokenizer=options.input.tokenizer or targets[0].facts.tokenizer_path,
        limits=Limits.strictest([target.limits for target in targets]),
        layout=targets[0].ready.layout,
        targets=targets,
    )


async def _tokenizer(options: RunOptions, clients: Sequence[Client]) -> str:
    """That of the first server that answers."""
    if options.input.tokenizer is not None:
        return options.input.tokenizer
    for client in clients[:-1]:
        with suppress(ServerUnreachable):
            return (await client.facts()).tokenizer_path
    return (await clients[-1].facts()).tokenizer_path


def _without_server(options: RunOptions) -> _Surroundings:
    tokenizer = options.input.tokenizer or options.servers.model
    why = f"no server answers at {', '.join(options.servers.urls)}."
    if tokenizer is None:
        raise UsageError(f"{why} Name a --tokenizer (or none, for rows of ids), or a --model.")
    if options.servers.model is None or not (Path(options.servers.model) / "config.json").is_file():
        return _Surroundings(tokenizer=tokenizer, why_no_speed=why)
    limits, layout = _from_model(Path(options.servers.model), options)
    return _Surroundings(tokenizer=tokenizer, limits=limits, layout=layout, why_no_speed=why)


def _from_model(folder: Path, options: RunOptions) -> tuple[Limits | None, StateLayout]:
    """What a server of that model would serve, by its configuration."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
        config = {**config, **config.get("text_config", {})}
        num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
        dtype = _DTYPES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        layers = options.servers.layers or DEFAULT_LAYERS
        layout = StateLayout(
            boundaries=boundaries_of(layers, num_layers=num_layers),
            hidden_size=hidden_size,
            dtype=dtype,
            last_kind=options.servers.last_kind or DEFAULT_LAST_KIND,
        )
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, DumpFormatError) as error:
        raise UsageError(f"{folder / 'config.json'}: no model's configuration ({error})") from error
    longest, vocab_size = config.get("max_position_embeddings"), config.get("vocab_size")
    if not isinstance(longest, int) or not isinstance(vocab_size, int):
        return None, layout
    limits = Limits(max_prompt_tokens=longest - 1, vocab_size=vocab_size, chunk_tokens=longest)
    return limits, layout


async def _forecast(
    options: RunOptions, around: _Surroundings, reporter: Reporter, timings: Timings
) -> Forecast:
    room = None
    if around.layout is not None:
        room = Room(layout=around.layout, budget_bytes=_budget(options, around))
    forecast = Forecast(
        admission=Admission(options.input.policy, around.limits, room),
        limits=around.limits,
        room=room,
        num_held=max_prompts(
            (options.load.concurrency or MAX_DEFAULT_LIMIT) * len(options.servers.urls)
        ),
        shard_bytes=options.output.shard_bytes,
        num_movers=options.load.num_movers,
    )
    with (
        pool_of_run(options.input, around.tokenizer, around.limits, timings.code) as pool,
        tempfile.TemporaryDirectory(prefix="dry-run-") as scratch,
    ):
        await asyncio.to_thread(pool.load)
        files = await asyncio.to_thread(
            scan_prompts, options.input.paths, options.input.reading, spool=Spool(Path(scratch))
        )
        num_rows = sum(file.num_rows for file in files)
        reporter.report(f"{counted(num_rows, 'row')} in {counted(len(files), 'file')}; tokenising")
        workers = num_workers_for(num_rows, options.input.tokenizer_workers)
        async for row in in_thread(prompts_of(files, pool, num_workers=workers)):
            forecast.add(row)
    return forecast


def _budget(options: RunOptions, around: _Surroundings) -> int:
    if around.targets:
        assert around.limits is not None
        ranks = [rank for target in around.targets for rank in target.ranks]
        return shm_budget(ranks, options.load.shm_budget_bytes, limits=around.limits)
    if options.load.shm_budget_bytes is not None:
        return options.load.shm_budget_bytes
    return free_bytes(nearest_existing(options.servers.dump_root)) // 2

"""Extracts a data set: prepares the output, finds the servers, and runs sessions until done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from extractor.core.counters import Counters
from extractor.core.errors import (
    BadAddress,
    BadDumpDir,
    ServerError,
    ServerGone,
    first_known,
    storage_error,
)
from extractor.core.events import Reporter
from extractor.core.humanize import counted
from extractor.core.identity import Identity
from extractor.core.request import Limits
from extractor.core.rids import rid_prefix
from extractor.core.run_options import RunOptions
from extractor.core.timings import DEFAULT_TIMINGS, StoreTimings, Timings
from extractor.dispatch.limiter import MAX_DEFAULT_LIMIT
from extractor.dispatch.provenance import Provenance
from extractor.dispatch.server import Server, require_connections
from extractor.dumps.collector import Collector, remove_dumps_of_the_dead
from extractor.dumps.discovery import require_dump_directory
from extractor.intake.prompt_files import reads_stdin, scan_prompts
from extractor.intake.prompt_stream import pool_of_run
from extractor.pipeline.open_data_set import OpenDataSet
from extractor.pipeline.resume import (
    NOW,
    RunState,
    begin_or_continue,
    begun_with_identity,
    require_same_inputs,
    with_frozen_clock,
)
from extractor.pipeline.session import Session
from extractor.pipeline.summary import RunSummary
from extractor.servers.client import Client, clients_of
from extractor.servers.probe import require_probe
from extractor.servers.shm_budget import headroom
from extractor.servers.target import Target, require_targets
from extractor.shards.output_dir import (
    OutputDirectory,
    manifest_warning,
    mode_of_files,
    prepare_out,
)
from extractor.shards.recovery import Reconciled, reconcile, require_begun, require_manifest
from extractor.shards.sequence import seal_left_open
from extractor.shards.writer import ShardSettings
from extractor.status.live_file import LiveFile
from extractor.status.reporters import Together
from extractor.system.lock import exclusive
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from prompts.inputs import InputFile
from prompts.paths import Spool
from prompts.pool import RendererPool

logger = logging.getLogger(__name__)


async def run(
    options: RunOptions, reporter: Reporter | None = None, *, timings: Timings = DEFAULT_TIMINGS
) -> RunSummary:
    """Extract every row of the input; returns when each is stored or failed.

    SIGINT, SIGTERM and SIGHUP stop it, in the main thread. Raises an ExtractorError (or a leaf
    package's error) when it cannot go on; samples stored until then are kept, and the same call
    resumes.
    """
    require_connections(options.load.concurrency, num_servers=len(options.servers.urls))
    out = options.output.directory
    reporter = Together() if reporter is None else Together(reporter)
    file_mode, has_others = mode_of_files(out, asked=options.output.file_mode)
    spool = Spool(out, mode=file_mode)
    try:
        files = await asyncio.to_thread(_scan, options, timings.store, spool)
    except asyncio.CancelledError:
        spool.forget()  # the thread may read for as long as it likes
        raise
    prepare_out(out, min_free_bytes=timings.store.min_free_bytes, file_mode=file_mode)
    if (warning := manifest_warning(out)) is not None:
        reporter.report(warning, level="warning")
    if has_others:
        reporter.report(
            f"warning: --file-mode {file_mode:o} is given to new files only. Run chmod for those "
            f"that {out} has already",
            level="warning",
        )
    try:
        with (
            exclusive(out, file_mode=file_mode) as directory,
            OutputDirectory.opened(directory, file_mode=file_mode) as output,
        ):
            require_manifest(out)
            live_file = LiveFile(
                output.out, file_mode=file_mode, interval_s=timings.status.live_interval_s
            )
            with closing(live_file) as live:
                async with _open_manifest(options.output.manifest_path, file_mode) as owner:
                    extraction = _Extraction(
                        options=options,
                        files=files,
                        output=output,
                        owner=owner,
                        reporter=Together(reporter, live),
                        timings=timings,
                    )
                    return await extraction.run()
    except OSError as error:
        raise storage_error(error, where=out) from error


def _scan(options: RunOptions, timings: StoreTimings, spool: Spool) -> tuple[InputFile, ...]:
    if reads_stdin(options.input.paths):
        prepare_out(
            options.output.directory, min_free_bytes=timings.min_free_bytes, file_mode=spool.mode
        )
    return scan_prompts(options.input.paths, options.input.reading, spool=spool)


@asynccontextmanager
async def _open_manifest(path: Path, file_mode: int) -> AsyncIterator[StoreOwner]:
    owner = await StoreOwner.open(path, file_mode=file_mode)
    try:
        yield owner
    except BaseException:
        # The first error is the one to show; a failed last commit is usually the same one.
        with suppress(Exception):
            await owner.close()
        raise
    else:
        await owner.close()


@dataclass(kw_only=True)
class _Extraction:
    """A command's work on an open data set, over all servers that go and come back."""

    options: RunOptions
    files: tuple[InputFile, ...]
    output: OutputDirectory
    owner: StoreOwner
    reporter: Reporter
    timings: Timings
    counters: Counters = field(default_factory=Counters)

    @property
    def out(self) -> Path:
        return self.options.output.directory

    async def run(self) -> RunSummary:
        """Start again as long as a lost server comes back in time."""
        wait_s = self.options.patience.server_wait_s
        while True:
            try:
                return await self._run_with_servers()
            except (ServerGone, ExceptionGroup) as error:
                if not isinstance(gone := first_known(error), ServerGone) or not wait_s:
                    raise
                self.reporter.report(
                    f"{gone.what}\nwaiting up to {wait_s:.0f} s for it",
                    event="servers_gone",
                    level="warning",
                )
            if self.counters.sent:
                # The failed rows of earlier commands were opened again; one that fails in this
                # command, perhaps because it kills servers, is not retried forever. A server that
                # comes back must match the one that the user allowed to differ.
                self.options = replace(self.options, retry_failed=False, allow_model_change=False)

    async def _run_with_servers(self) -> RunSummary:
        owner, reporter, counters = self.owner, self.reporter, self.counters
        state = await RunState.load(owner, self.files, counters)
        if state.is_new:
            require_begun(self.out)
        else:
            await require_same_inputs(owner, self.options, self.files)
        options = self.options = await with_frozen_clock(owner, self.options, state)
        logger.info(
            "session run=%s rows=%d settled=%d",
            state.run_id, counters.rows.total, counters.rows.settled_before,
        )  # fmt: skip
        left = await reconcile(owner, self.output.shards, report=reporter.report)
        state.forget(left.lost)
        async with clients_of(
            options, default_concurrency=MAX_DEFAULT_LIMIT, timings=self.timings.client
        ) as clients:
            try:
                servers = await self._preflight(clients)
            except (ServerError, BadAddress, BadDumpDir):
                if not state.is_finished or options.retry_failed:
                    raise
                reporter.report("Every row is settled already; the server was not needed.")
                await self._seal_all(left)
                begun_with = await begun_with_identity(owner)
                provenance = await Provenance.load(
                    owner, self.output, begun_with, allow_change=False
                )
                provenance.write()
                return await self._summary()
            with self._pool(servers) as pool:
                return await self._extract(servers, pool, state, left)

    async def _extract(
        self, servers: Sequence[Server], pool: RendererPool, state: RunState, left: Reconciled
    ) -> RunSummary:
        owner, options, counters = self.owner, self.options, self.counters
        targets = [server.target for server in servers if server.target is not None]
        identity = await self._identity(state, targets[0], pool)
        provenance = await self._provenance(identity, targets)
        if options.retry_failed:
            # Only now: a command that is refused must leave the data set as it was.
            reopened = await owner.call(Store.reopen_failed)
            self.reporter.report(f"tried again: {counted(reopened, 'failed row')}")
            counters.rows.failed_by_reason.clear()
            state = await RunState.load(owner, self.files, counters)
        if state.is_finished:
            prefix = rid_prefix(state.run_id)
            remove_dumps_of_the_dead(options.servers.dumps, rid_prefix=prefix)
            for target in targets:
                Collector(target.ranks, rid_prefix=prefix).sweep()
            await self._seal_all(left)
            return await self._summary()
        self._announce(identity, targets)
        await self._probe(servers, provenance, run_id=state.run_id)
        data_set = OpenDataSet(
            settings=self._settings(identity),
            provenance=provenance,
            owner=owner,
            state=state,
            left=left,
            files=self.files,
            pool=pool,
        )
        session = Session(
            options=options,
            data_set=data_set,
            servers=servers,
            reporter=self.reporter,
            timings=self.timings,
        )
        await session.run()
        return await self._summary(servers)

    async def _preflight(self, clients: Sequence[Client]) -> list[Server]:
        """The servers, of which at least one is compatible."""
        options = self.options
        before = {now.url: now.num_prompts for now in self.counters.now.servers}
        targets = await require_targets(clients, options, report=self.reporter.report)
        compatible = [target for target in targets if target is not None]
        for target in compatible:
            require_dump_directory(target.ranks)
        return [
            Server(client=client, target=target, num_before=before.get(client.url, 0))
            for client, target in zip(clients, targets, strict=True)
        ]

    def _pool(self, servers: Sequence[Server]) -> RendererPool:
        options = self.options.input
        targets = [server.target for server in servers if server.target is not None]
        return pool_of_run(
            options,
            options.tokenizer or targets[0].facts.tokenizer_path,
            Limits.strictest([target.limits for target in targets]),
            self.timings.code,
        )

    async def _identity(self, state: RunState, target: Target, pool: RendererPool) -> Identity:
        """The data set's identity, in the manifest from now on."""
        options = self.options
        facts = await asyncio.to_thread(pool.load)
        identity = Identity(
            model=target.ready.model,
            boundaries=target.ready.capture.boundaries,
            last_kind=target.ready.capture.last_kind,
            tokenizer_digest=facts.tokenizer_digest,
            template_digest=facts.template_digest,
            reading=options.input.document | ({NOW: facts.now} if facts.now else {}),
            inputs=tuple(file.digest for file in self.files),
        )
        has_work = not state.is_finished or options.retry_failed
        return await begin_or_continue(
            self.owner, self.out, identity, self.files, state, pool, has_work=has_work
        )

    async def _provenance(self, identity: Identity, targets: Sequence[Target]) -> Provenance:
        provenance = await Provenance.load(
            self.owner, self.output, identity, allow_change=self.options.allow_model_change
        )
        for target in targets:
            provenance.check(target)
            if target.ready.weights.id is None:
                self.reporter.report(
                    f"warning: the plugin of {target.url} has no fingerprint of the weights, so "
                    "only the canary can detect another checkpoint: see the server's log, or "
                    "upgrade hidden-state-extractor in its environment",
                    level="warning",
                )
        provenance.write()
        return provenance

    def _announce(self, identity: Identity, targets: Sequence[Target]) -> None:
        rows, report = self.counters.rows, self.reporter.report
        report(
            f"{identity.model.path} at {', '.join(target.url for target in targets)}: "
            f"{identity.capture_text}; {rows.total:,} rows, {rows.settled:,} settled before"
        )
        if self.options.load.shm_budget_bytes is None:
            ranks = [rank for target in targets for rank in target.ranks]
            if doubt := headroom(ranks).doubt:
                report(f"{doubt} (or name --shm-budget)", level="warning")

    async def _probe(
        self, servers: Sequence[Server], provenance: Provenance, *, run_id: str
    ) -> None:
        """Check the canary of each server that is up, and record its start. Raises one error."""
        up = [(server.client, server.target) for server in servers if server.target is not None]
        try:
            async with asyncio.TaskGroup() as tasks:
                probes = [
                    tasks.create_task(
                        require_probe(
                            client,
                            target,
                            run_id=run_id,
                            canary_ids=provenance.canary_ids,
                            timings=self.timings,
                        )
                    )
                    for client, target in up
                ]
        except ExceptionGroup as group:
            raise first_known(group) from group
        for (_, target), probe in zip(up, probes, strict=True):
            await provenance.add(target, probe.result())

    async def _seal_all(self, left: Reconciled) -> None:
        """Seal every shard: no row is left to store."""
        identity = await begun_with_identity(self.owner)
        settings = self._settings(identity)
        for found in left.open_shards:
            await seal_left_open(settings, self.owner, found)

    def _settings(self, identity: Identity) -> ShardSettings:
        return ShardSettings(
            directory=self.output.shards,
            file_mode=self.output.file_mode,
            shard_bytes=self.options.output.shard_bytes,
            identity=identity,
        )

    async def _summary(self, servers: Sequence[Server] = ()) -> RunSummary:
        is_changed = bool(self.counters.rows.stored)
        return RunSummary(
            totals=await self.owner.call(Store.totals),
            duplicates=await self.owner.call(Store.count_duplicates) if is_changed else None,
            counters=self.counters,
            servers=tuple(servers),
            commits=self.owner.commits,
        )

"""The main job: stream prompts to the server, prove what comes back, keep it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from extractor.core.admission import token_bound
from extractor.core.counters import Counters, Stage
from extractor.core.errors import (
    BadAddress,
    BadDumpDir,
    ServerError,
    ServerGone,
    first_known,
    storage_error,
)
from extractor.core.events import Reporter
from extractor.core.humanize import amount, counted, milliseconds, table
from extractor.core.identity import Identity
from extractor.core.request import Limits
from extractor.core.rids import rid_prefix
from extractor.core.run_options import RunOptions
from extractor.dispatch.health import RESTART_ADVICE
from extractor.dispatch.limiter import MOST_LIMIT
from extractor.dispatch.provenance import Provenance
from extractor.dispatch.server_pool import Member, require_connections
from extractor.dumps.collector import Collector, remove_dumps_of_the_dead
from extractor.dumps.discovery import require_dump_directory
from extractor.intake.prompt_files import forget_spooled, reads_stdin, scan_prompts
from extractor.intake.prompt_stream import renderer_for
from extractor.pipeline.resume import (
    NOW,
    RunState,
    begin_or_continue,
    begun_with_identity,
    require_same_inputs,
    with_frozen_clock,
)
from extractor.pipeline.session import Session, shard_settings
from extractor.servers.client import Client, clients_of
from extractor.servers.probe import require_probe
from extractor.servers.shm_budget import headroom
from extractor.servers.target import require_targets
from extractor.shards.mover import seal_left_open
from extractor.shards.output_dir import manifest_warning, prepare_out
from extractor.shards.recovery import Reconciled, reconcile
from extractor.shards.strays import require_begun, require_manifest
from extractor.status.live_file import LiveFile
from extractor.status.report import session_document, totals_document, totals_table
from extractor.status.reporters import Together
from extractor.system.lock import exclusive
from manifest.records import Totals
from manifest.states import ASKED_FOR, State
from manifest.store import Store
from manifest.writer_thread import Commits, StoreOwner
from prompts.inputs import InputFile
from prompts.render import Renderer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a finished run leaves."""

    totals: Totals
    counters: Counters
    duplicates: int | None  # among stored samples; None where nothing was stored, so not counted
    members: tuple[Member, ...]  # the servers; empty where nothing was to be sent
    commits: Commits  # of the manifest, this session
    run_id: str

    @property
    def num_failed(self) -> int:
        """Failed rows, but for those that the user asked to leave out."""
        asked_for = sum(self.totals.by_reason.get(reason, 0) for reason in ASKED_FOR)
        return self.totals.by_state.get(State.FAILED, 0) - asked_for

    def to_document(self, out: Path) -> dict[str, Any]:
        """The stable JSON of `extractor run --json`."""
        counters = self.counters
        return {
            "out": str(out),
            **totals_document(self.totals),
            "duplicates": self.duplicates,
            "session": {
                **session_document(counters),
                "peak_shm_bytes": counters.now.peak_shm_bytes,
                "servers": [member.to_document() for member in self.members],
                "commits": self.commits.to_document(),
            },
        }

    def to_text(self, out: Path) -> str:
        """What `extractor run` prints at its end."""
        counters = self.counters
        lines = [totals_table(self.totals)]
        if counters.rows.stored:
            residency = counters.stages[Stage.RESIDENCY]
            session = [
                (
                    "this session",
                    f"{counters.rows.stored:,} samples in {counters.pace.seconds:.1f} s",
                ),
                ("speed", f"{counters.tokens_per_s:,.0f} tok/s"),
                ("room held for dumps", f"{amount(counters.now.peak_shm_bytes)} at most"),
                (
                    "a dump lay there",
                    f"{milliseconds(residency.quantile(0.5))} at the median, "
                    f"{milliseconds(residency.quantile(0.99))} at p99",
                ),
                *((f"requests at {member.url}", member.to_text()) for member in self.members),
                ("sent again", f"{counters.retried:,}"),
                ("duplicates", f"{self.duplicates or 0:,}"),
            ]
            lines.append(table(session))
        if self.num_failed:
            lines.append(f"failed rows, each with its reason: extractor status {out}")
        lines.append(f"data set in {out}; prove it with: extractor verify {out}")
        return "\n".join(lines)


async def run(options: RunOptions, reporter: Reporter | None = None) -> RunSummary:
    """Extract every row of the input; returns when each is stored or failed.

    SIGINT, SIGTERM and SIGHUP stop it, in the main thread. Raises an ExtractorError (or a leaf
    package's error) when it cannot go on; what is stored by then stays, and the same call resumes.
    """
    require_connections(options.load.concurrency, num_servers=len(options.servers.urls))
    reporter = Together() if reporter is None else Together(reporter)
    try:
        files = await asyncio.to_thread(_scan, options)
    except asyncio.CancelledError:
        if reads_stdin(options.input.paths):
            forget_spooled(options.output.directory)  # the thread may read for as long as it likes
        raise
    prepare_out(options.output.directory)
    if (warning := manifest_warning(options.output.directory)) is not None:
        reporter.report(warning, level="warning")
    try:
        with exclusive(options.output.directory):
            require_manifest(options.output.directory)
            with closing(LiveFile(options.output.directory)) as live:
                async with _open_manifest(options) as owner:
                    return await _run_until_done(options, Together(reporter, live), files, owner)
    except OSError as error:
        raise storage_error(error, where=options.output.directory) from error


async def _run_until_done(
    options: RunOptions, reporter: Reporter, files: tuple[InputFile, ...], owner: StoreOwner
) -> RunSummary:
    """Begin anew, for as long as a server that went comes back in time."""
    counters = Counters()
    while True:
        try:
            return await _run(options, reporter, files, owner, counters)
        except (ServerGone, ExceptionGroup) as error:
            if (
                not isinstance(gone := first_known(error), ServerGone)
                or not options.patience.server_wait_s
            ):
                raise
            what = str(gone).removesuffix(RESTART_ADVICE).rstrip()
            reporter.report(
                f"{what}\nwaiting up to {options.patience.server_wait_s:.0f} s for it",
                event="servers_gone",
                level="warning",
            )
            if counters.sent:
                # The failed rows of earlier commands were opened again; one that fails in this
                # command, perhaps because it kills servers, is not retried forever. A server that
                # comes back must match the one that the user allowed to differ.
                options = replace(options, retry_failed=False, allow_model_change=False)


def _scan(options: RunOptions) -> tuple[InputFile, ...]:
    if reads_stdin(options.input.paths):
        prepare_out(options.output.directory)
    return scan_prompts(
        options.input.paths, options.input.reading, spool_directory=options.output.directory
    )


async def _run(
    options: RunOptions,
    reporter: Reporter,
    files: tuple[InputFile, ...],
    owner: StoreOwner,
    counters: Counters,
) -> RunSummary:
    state = await RunState.load(owner, files, counters)
    if state.is_new:
        require_begun(options.output.directory)
    else:
        await require_same_inputs(owner, options, files)
    options = await with_frozen_clock(owner, options, state)
    logger.info(
        "session run=%s rows=%d settled=%d",
        state.run_id, counters.rows.total, counters.rows.settled_before,
    )  # fmt: skip
    left = await reconcile(owner, options.output.shards_path, report=reporter.report)
    state.forget(left.lost)
    async with clients_of(
        options.servers.urls,
        concurrency=options.load.concurrency or MOST_LIMIT,
        request_timeout_s=options.patience.request_timeout_s,
    ) as clients:
        try:
            members, renderer = await _preflight(options, clients, reporter, counters)
        except (ServerError, BadAddress, BadDumpDir):
            if not state.is_finished or options.retry_failed:
                raise
            reporter.report("Every row is settled already; the server was not needed.")
            await _seal_all(owner, options, left)
            begun_with = await begun_with_identity(owner)
            (
                await Provenance.load(
                    owner, options.output.directory, begun_with, allow_change=False
                )
            ).write()
            return await _summary(owner, state)
        targets = [member.target for member in members if member.target is not None]
        ready = targets[0].ready
        identity = Identity.of(
            ready,
            tokenizer_digest=renderer.tokenizer_digest,
            template_digest=renderer.template_digest,
            reading=options.input.document | ({NOW: renderer.now} if renderer.now else {}),
            inputs=tuple(file.digest for file in files),
        )
        identity = await begin_or_continue(
            owner,
            options.output.directory,
            identity,
            files,
            state,
            renderer,
            has_work=not state.is_finished or options.retry_failed,
        )
        options.output.shards_path.mkdir(exist_ok=True)
        provenance = await Provenance.load(
            owner, options.output.directory, identity, allow_change=options.allow_model_change
        )
        for target in targets:
            provenance.check(target)
            if target.ready.weights is None:
                reporter.report(
                    f"warning: the plugin of {target.url} has no fingerprint of the weights, so "
                    "only the canary can detect another checkpoint: see the server's log, or "
                    "upgrade hidden-state-extractor in its environment",
                    level="warning",
                )
        provenance.write()
        if options.retry_failed:
            # Only now: a command that is refused must leave the data set as it was.
            reopened = await owner.call(Store.reopen_failed)
            reporter.report(f"tried again: {counted(reopened, 'failed row')}")
            counters.rows.failed_by_reason.clear()
            state = await RunState.load(owner, files, counters)
        if state.is_finished:
            remove_dumps_of_the_dead(options.servers.dump_root, rid_prefix=rid_prefix(state.run_id))
            for target in targets:
                Collector(target.ranks, rid_prefix=rid_prefix(state.run_id)).sweep()
            await _seal_all(owner, options, left)
            return await _summary(owner, state)
        reporter.report(
            f"{ready.model_path} at {', '.join(target.url for target in targets)}: "
            f"boundaries {list(identity.boundaries)}, last {identity.last_kind}, {identity.dtype}; "
            f"{state.counters.rows.total:,} rows, {state.counters.rows.settled:,} settled before"
        )
        if options.load.shm_budget_bytes is None:
            ranks = [rank for target in targets for rank in target.ranks]
            if doubt := headroom(ranks).doubt:
                reporter.report(f"{doubt} (or name --shm-budget)", level="warning")
        await _probe(members, provenance, run_id=state.run_id)
        session = Session(
            options=options,
            members=members,
            identity=identity,
            provenance=provenance,
            renderer=renderer,
            owner=owner,
            reporter=reporter,
            state=state,
            left=left,
        )
        await session.run(files)
        return await _summary(
            owner,
            state,
            members=tuple(members),
        )


@asynccontextmanager
async def _open_manifest(options: RunOptions) -> AsyncIterator[StoreOwner]:
    owner = await StoreOwner.open(options.output.manifest_path)
    try:
        yield owner
    except BaseException:
        # The first error is the one to show; a failed last commit is usually the same one.
        with suppress(Exception):
            await owner.close()
        raise
    else:
        await owner.close()


async def _preflight(
    options: RunOptions, clients: Sequence[Client], reporter: Reporter, counters: Counters
) -> tuple[list[Member], Renderer]:
    """The servers, of which one at least is fit to run against."""
    before = {server.url: server.num_prompts for server in counters.now.servers}
    targets = await require_targets(clients, options, report=reporter.report)
    for target in targets:
        if target is not None:
            require_dump_directory(target.ranks)
    members = [
        Member(client=client, target=target, num_before=before.get(client.url, 0))
        for client, target in zip(clients, targets, strict=True)
    ]
    tokenizer = options.input.tokenizer or next(
        target.facts.tokenizer_path for target in targets if target is not None
    )
    limits = Limits.strictest([target.limits for target in targets if target is not None])
    bound = token_bound(options.input.policy, limits)
    return members, await asyncio.to_thread(renderer_for, tokenizer, options.input.reading, bound)


async def _probe(members: Sequence[Member], provenance: Provenance, *, run_id: str) -> None:
    """Check the canary of each server that is up and record its start.

    Raises the first error of any server.
    """
    up = [(member.client, member.target) for member in members if member.target is not None]
    try:
        async with asyncio.TaskGroup() as tasks:
            probes = [
                tasks.create_task(
                    require_probe(client, target, run_id=run_id, canary_ids=provenance.canary_ids)
                )
                for client, target in up
            ]
    except ExceptionGroup as group:
        raise first_known(group) from group
    for (_, target), probe in zip(up, probes, strict=True):
        await provenance.add(target, probe.result())


async def _seal_all(owner: StoreOwner, options: RunOptions, left: Reconciled) -> None:
    """Seal every shard: no row is left to store."""
    settings = shard_settings(options, await begun_with_identity(owner))
    for found in left.open_shards:
        await seal_left_open(settings, owner, found.shard, found.rows)


async def _summary(
    owner: StoreOwner,
    state: RunState,
    *,
    members: tuple[Member, ...] = (),
) -> RunSummary:
    duplicates = None
    if state.counters.rows.stored:
        duplicates = await owner.call(Store.count_duplicates)
    return RunSummary(
        totals=await owner.call(Store.totals),
        duplicates=duplicates,
        counters=state.counters,
        members=members,
        commits=owner.commits,
        run_id=state.run_id,
    )

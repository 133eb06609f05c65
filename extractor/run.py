"""The main job: stream prompts to the server, prove what comes back, keep it.

One task reads and tokenises; it admits each prompt to a task of its own, which sends it, waits
for its pieces and hands them to a mover. Everything in flight is bounded: requests by
`concurrency`, bytes under the dump root by the budget, tasks by both.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice

from extractor import __version__
from extractor.budget import ByteBudget
from extractor.client import Client
from extractor.collector import Collector
from extractor.config import DATASET_NAME, Identity, RunOptions
from extractor.dataset import dataset_document
from extractor.errors import Interrupted, ServerError, ServerLost
from extractor.files import write_whole
from extractor.lock import exclusive
from extractor.mover import Mover, seal_left_open
from extractor.plan import Request, dump_bytes, make_rid, refusal, rid_prefix
from extractor.preflight import (
    Target,
    limits_of,
    prepare_out,
    require_dump_directory,
    require_plugin,
    require_probe,
    require_server,
    shm_budget,
)
from extractor.progress import Counters, Reporter
from extractor.reconcile import Reconciled, reconcile
from extractor.retry import Failure, Remedy, RetryPolicy
from extractor.shard_format import sample_bytes
from extractor.shards import ShardSettings
from extractor.verify import check_reply
from extractor.writers import is_alive
from manifest.owner import StoreOwner
from manifest.records import Failed, Moved, Planned, Rejected, Source, Totals
from manifest.states import Event, Reason
from manifest.store import Store
from prompts.inputs import InputFile, scan_inputs
from prompts.render import Renderer
from prompts.stream import read_prompts
from prompts.types import BadRow, Prompt

RUN_ID = "run_id"
NO_TOKENIZER = "none"
#: Prompts tokenised per visit to the reading thread.
READ_BATCH = 16
REPORT_INTERVAL_S = 0.5
#: After a signal, requests in flight get this long to end by themselves.
DRAIN_S = 25.0
#: A server that answers nothing for this long is taken for dead although its process lives.
SERVER_SILENCE_S = 30.0
ALIVE_INTERVAL_S = 0.5
RESTART_ADVICE = "Restart it and run the same command again; nothing stored is sent twice."
#: Failed rows that are named as they happen; `extractor status` lists all.
SHOWN_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a finished run leaves."""

    totals: Totals
    counters: Counters
    peak_shm_bytes: int
    run_id: str


async def run(options: RunOptions, reporter: Reporter) -> RunSummary:
    """Extract every row of the input; returns when each is stored or failed.

    Raises an ExtractorError (or a leaf package's error) when it cannot; whatever was stored by
    then stays, and the same call goes on.
    """
    files = await asyncio.to_thread(scan_inputs, [str(path) for path in options.prompts])
    prepare_out(options.out)
    with exclusive(options.out):
        async with _open_manifest(options) as owner:
            return await _run(options, reporter, files, owner)


async def _run(
    options: RunOptions, reporter: Reporter, files: tuple[InputFile, ...], owner: StoreOwner
) -> RunSummary:
    progress = await _Progress.load(owner, files)
    if not progress.is_new:
        await _require_same_inputs(owner, options, files)
    left = await reconcile(owner, options.shards_path, note=reporter.note)
    progress.forget(left.lost)
    async with Client(
        options.server_url,
        concurrency=options.concurrency,
        request_timeout_s=options.request_timeout_s,
    ) as client:
        try:
            target, renderer = await _preflight(options, client)
        except ServerError:
            if not progress.is_finished:
                raise
            reporter.note("Every row is settled already; the server was not needed.")
            await _seal_all(owner, options, left)
            return await _summary(owner, progress, peak_shm_bytes=0)
        identity = Identity.of(
            target.ready,
            tokenizer_digest=renderer.tokenizer_digest,
            template_digest=renderer.template_digest,
            inputs=tuple(file.digest for file in files),
        )
        identity = await _begin_or_continue(owner, options, identity, files, progress)
        write_whole(
            options.out / DATASET_NAME,
            dataset_document(identity, engine_version=target.ready.engine_version),
        )
        if progress.is_finished:
            Collector(target.ranks, rid_prefix=rid_prefix(progress.run_id)).sweep()
            await _seal_all(owner, options, left)
            return await _summary(owner, progress, peak_shm_bytes=0)
        await require_probe(client, target, run_id=progress.run_id)
        session = _Session(
            options=options,
            client=client,
            target=target,
            identity=identity,
            renderer=renderer,
            owner=owner,
            reporter=reporter,
            progress=progress,
            left=left,
        )
        await session.run(files)
        return await _summary(owner, progress, peak_shm_bytes=session.budget.peak_bytes)


@asynccontextmanager
async def _open_manifest(options: RunOptions) -> AsyncIterator[StoreOwner]:
    owner = await StoreOwner.open(options.manifest_path)
    try:
        yield owner
    except BaseException:
        # The first error is the one to show; a failed last commit is usually the same one.
        with suppress(Exception):
            await owner.close()
        raise
    else:
        await owner.close()


async def _preflight(options: RunOptions, client: Client) -> tuple[Target, Renderer]:
    facts = await require_server(client, wait_s=options.server_wait_s)
    ranks = require_plugin(options.dump_root, url=options.server_url, facts=facts)
    require_dump_directory(ranks)
    target = Target(facts=facts, ranks=ranks, limits=limits_of(facts, ranks[0].ready))
    tokenizer = options.tokenizer or facts.tokenizer_path
    if tokenizer == NO_TOKENIZER:
        return target, Renderer()
    return target, await asyncio.to_thread(Renderer.load, tokenizer)


@dataclass(kw_only=True)
class _Progress:
    """What earlier sessions left, and the numbers of this one."""

    run_id: str
    settled: bytearray  # 1 for each row that needs no more work, by ordinal
    attempts: dict[int, int]
    counters: Counters
    is_new: bool

    @classmethod
    async def load(cls, owner: StoreOwner, files: Sequence[InputFile]) -> _Progress:
        num_rows = sum(file.num_rows for file in files)

        def read(store: Store) -> _Progress:
            identity = store.identity()
            settled = bytearray(num_rows)
            count = 0
            for ordinal in store.settled_ordinals():
                if ordinal < num_rows:
                    settled[ordinal] = 1
                    count += 1
            return cls(
                run_id=identity.get(RUN_ID) or secrets.token_hex(4),
                settled=settled,
                attempts=store.attempts(),
                counters=Counters(num_rows=num_rows, settled_before=count),
                is_new=not identity,
            )

        return await owner.call(read)

    def forget(self, ordinals: Sequence[int]) -> None:
        """These rows need work again."""
        for ordinal in ordinals:
            self.settled[ordinal] = 0
        self.counters.settled_before -= len(ordinals)

    @property
    def is_finished(self) -> bool:
        return not self.is_new and self.counters.settled_before == self.counters.num_rows


async def _begin_or_continue(
    owner: StoreOwner,
    options: RunOptions,
    identity: Identity,
    files: Sequence[InputFile],
    progress: _Progress,
) -> Identity:
    """What the data set is of, as the manifest has it. Raises ConfigMismatch."""
    options.shards_path.mkdir(exist_ok=True)
    if progress.is_new:
        sources = [
            Source(
                number=number,
                path=file.path,
                size_bytes=file.size_bytes,
                digest=file.digest,
                num_rows=file.num_rows,
            )
            for number, file in enumerate(files)
        ]
        document = {**identity.to_document(), RUN_ID: progress.run_id, "version": __version__}
        await owner.call(lambda store: store.begin(document, sources))
        return identity
    begun_with = await _begun_with(owner)
    identity.require_same(begun_with, out=options.out)
    await owner.call(lambda store: store.reopen_unfinished())
    return begun_with


async def _begun_with(owner: StoreOwner) -> Identity:
    return Identity.from_document(await owner.call(lambda store: store.identity()))


async def _require_same_inputs(
    owner: StoreOwner, options: RunOptions, files: Sequence[InputFile]
) -> None:
    """Raise ConfigMismatch for other prompts than the manifest's; this needs no server."""
    begun_with = await _begun_with(owner)
    now = replace(begun_with, inputs=tuple(file.digest for file in files))
    now.require_same(begun_with, out=options.out)


async def _seal_all(owner: StoreOwner, options: RunOptions, left: Reconciled) -> None:
    """Seal every shard: no row is left to store."""
    settings = _shard_settings(options, await _begun_with(owner))
    for found in left.open_shards:
        await seal_left_open(settings, owner, found.shard, found.rows)


def _shard_settings(options: RunOptions, identity: Identity) -> ShardSettings:
    return ShardSettings(
        directory=options.shards_path,
        identity=identity,
        shard_bytes=options.shard_bytes,
        file_mode=options.file_mode,
    )


async def _summary(owner: StoreOwner, progress: _Progress, *, peak_shm_bytes: int) -> RunSummary:
    totals = await owner.call(lambda store: store.totals())
    return RunSummary(
        totals=totals,
        counters=progress.counters,
        peak_shm_bytes=peak_shm_bytes,
        run_id=progress.run_id,
    )


class _Session:
    """One process's work on a run: the tasks and what they share."""

    def __init__(
        self,
        *,
        options: RunOptions,
        client: Client,
        target: Target,
        identity: Identity,
        renderer: Renderer,
        owner: StoreOwner,
        reporter: Reporter,
        progress: _Progress,
        left: Reconciled,
    ) -> None:
        self._options = options
        self._client = client
        self._target = target
        self._layout = identity.layout
        self._renderer = renderer
        self._owner = owner
        self._reporter = reporter
        self._progress = progress
        self._counters = progress.counters
        self._session_id = secrets.token_hex(3)
        self._policy = RetryPolicy(max_attempts=options.max_attempts)
        self._collector = Collector(target.ranks, rid_prefix=rid_prefix(progress.run_id))
        self._settings = _shard_settings(options, identity)
        self._left = left
        self._next_shard = left.next_number
        self._movers: list[Mover] = []
        self.budget = ByteBudget(
            shm_budget(target.ranks, options.shm_budget_bytes, limits=target.limits)
        )
        self._requests = asyncio.Semaphore(options.concurrency)
        # A prompt's task outlives its request by the copy to the shard; twice as many tasks as
        # requests keep the server busy meanwhile.
        self._tasks = asyncio.Semaphore(2 * options.concurrency)
        self._rids: set[str] = set()  # with the server now
        self._stop = asyncio.Event()
        self._last_answer_s = 0.0  # loop time

    async def run(self, files: Sequence[InputFile]) -> None:
        """Settle every row that is not settled yet. Raises Interrupted after a signal."""
        self._last_answer_s = asyncio.get_running_loop().time()
        await self._open_shards()
        is_complete = False
        try:
            with _stop_on_signals(self._stop):
                await self._run_tasks(files)
            is_complete = not self._stop.is_set()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise  # somebody else's cancellation
            raise Interrupted("stopped at once; what was in flight is sent again") from None
        finally:
            await self._clean_up()
            for mover in self._movers:
                await mover.close(seal=is_complete)
            self._reporter.update(self._counters)
            self._reporter.close()
        if self._stop.is_set():
            raise Interrupted(
                f"stopped with {self._counters.settled} of {self._counters.num_rows} rows "
                "settled; the same command goes on"
            )

    async def _run_tasks(self, files: Sequence[InputFile]) -> None:
        async with asyncio.TaskGroup() as helpers:
            background = [
                helpers.create_task(self._collector.run(), name="collector"),
                helpers.create_task(self._report(), name="reporter"),
                helpers.create_task(self._enforce_drain(), name="drain"),
                helpers.create_task(self._watch_server(), name="server-watch"),
                *(
                    helpers.create_task(mover.run(), name=f"mover-{number}")
                    for number, mover in enumerate(self._movers)
                ),
            ]
            async with asyncio.TaskGroup() as work:
                await self._admit_all(files, work)
            for task in background:
                task.cancel()

    # --- prompts -----------------------------------------------------------------------------

    async def _admit_all(self, files: Sequence[InputFile], work: asyncio.TaskGroup) -> None:
        settled = self._progress.settled
        source_numbers = {file.path: number for number, file in enumerate(files)}
        rows = read_prompts(files, self._renderer, skip=lambda ordinal: bool(settled[ordinal]))
        async for item in _in_thread(rows):
            if self._stop.is_set():
                return
            source = source_numbers[item.source]
            if isinstance(item, BadRow):
                self._reject(item, source, Reason(item.reason.value), item.detail)
                continue
            refused = refusal(item, self._target.limits)
            size = dump_bytes(item.num_tokens, self._layout, self._target.limits)
            if refused is not None:
                self._reject(item, source, refused.reason, refused.detail)
                continue
            if size > self.budget.total_bytes:
                detail = (
                    f"its dumps take {size} bytes, the budget under the dump root is "
                    f"{self.budget.total_bytes} (--shm-budget)"
                )
                self._reject(item, source, Reason.TOO_LARGE, detail)
                continue
            await self._tasks.acquire()
            if self._stop.is_set():
                return
            self._owner.post(
                Planned(
                    ordinal=item.ordinal,
                    source=source,
                    line=item.line,
                    label=item.label,
                    key=item.key,
                    num_tokens=item.num_tokens,
                    num_trained=item.num_trained,
                )
            )
            work.create_task(self._process(item, size), name=f"prompt-{item.ordinal}")

    def _reject(self, row: Prompt | BadRow, source: int, reason: Reason, detail: str) -> None:
        self._owner.post(
            Rejected(
                ordinal=row.ordinal,
                source=source,
                line=row.line,
                label=row.label,
                reason=reason,
                detail=detail,
                key=row.key if isinstance(row, Prompt) else None,
                num_tokens=row.num_tokens if isinstance(row, Prompt) else None,
            )
        )
        self._count_failed(row, reason, detail)

    async def _process(self, prompt: Prompt, size_bytes: int) -> None:
        """Attempts, until the prompt is stored or given up, or the run stops."""
        try:
            attempt = self._progress.attempts.get(prompt.ordinal, 0)
            setbacks = 0  # of this session
            counted = 0  # setbacks that were this prompt's own
            while not self._stop.is_set():
                attempt += 1
                async with self.budget.hold(size_bytes):
                    if self._stop.is_set():
                        return
                    failure = await self._attempt(prompt, attempt)
                if failure is None:
                    self._count_stored(prompt)
                    return
                if failure.is_transport:
                    await self._check_silence(failure)
                setbacks += 1
                counted += not failure.is_not_counted
                remedy = self._policy.remedy(failure, num_counted=counted)
                if remedy is Remedy.GIVE_UP:
                    self._give_up(prompt, failure, attempt)
                    return
                self._counters.retried += 1
                self._owner.post(Moved(ordinal=prompt.ordinal, event=Event.RETRY, attempts=attempt))
                delay_s = self._policy.delay_s(setbacks, chance=random.random())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), delay_s)
        finally:
            self._tasks.release()

    def _count_stored(self, prompt: Prompt) -> None:
        self._counters.stored += 1
        self._counters.tokens += prompt.num_tokens
        self._counters.stored_bytes += sample_bytes(prompt.num_tokens, self._layout)

    def _give_up(self, prompt: Prompt, failure: Failure, attempt: int) -> None:
        self._owner.post(
            Failed(
                ordinal=prompt.ordinal,
                reason=failure.reason,
                detail=failure.detail,
                attempts=attempt,
            )
        )
        self._count_failed(prompt, failure.reason, failure.detail)

    def _count_failed(self, row: Prompt | BadRow, reason: Reason, detail: str) -> None:
        self._counters.failed += 1
        if self._counters.failed <= SHOWN_FAILURES:
            self._reporter.note(f"{row.source}:{row.line}: {reason}: {detail}")
        elif self._counters.failed == SHOWN_FAILURES + 1:
            self._reporter.note("… further failed rows: see `extractor status`")

    async def _attempt(self, prompt: Prompt, attempt: int) -> Failure | None:
        """Send once; None when the sample is durable, else why this attempt gave none."""
        rid = make_rid(
            run_id=self._progress.run_id,
            session_id=self._session_id,
            ordinal=prompt.ordinal,
            attempt=attempt,
        )
        collected = self._collector.expect(rid, num_tokens=prompt.num_tokens)
        is_taken = False
        try:
            reply_failure = await self._send(Request(rid=rid, prompt=prompt), attempt)
            if reply_failure is not None:
                # A dump may have come nevertheless: it goes before its room is given back.
                self._collector.poll()
                return reply_failure
            try:
                outcome = await asyncio.wait_for(
                    asyncio.shield(collected), self._options.dump_timeout_s
                )
            except TimeoutError:
                return Failure(
                    reason=Reason.DUMP_MISSING,
                    detail=f"answered, but {self._collector.rows_seen(rid)} of "
                    f"{prompt.num_tokens} rows arrived in {self._options.dump_timeout_s:g} s",
                )
            is_taken = True
        finally:
            if not is_taken:
                self._collector.drop(rid, collected)
        if isinstance(outcome, Failure):
            return outcome
        self._owner.post(Moved(ordinal=prompt.ordinal, event=Event.DUMP, attempts=attempt))
        mover = min(self._movers, key=lambda mover: mover.backlog)
        return await mover.store(prompt, outcome, attempts=attempt)

    async def _send(self, request: Request, attempt: int) -> Failure | None:
        """One request within the concurrency limit; None when the server prefilled all of it."""
        async with self._requests:
            self._owner.post(
                Moved(ordinal=request.prompt.ordinal, event=Event.SEND, attempts=attempt)
            )
            self._counters.sent += 1
            self._rids.add(request.rid)
            reply = await self._client.generate(request)
            self._rids.discard(request.rid)
        if isinstance(reply, Failure):
            if not reply.is_transport and not reply.is_busy:
                # It may still be at work on it, after a time-out of ours.
                await self._client.abort(request.rid)
            return reply
        self._last_answer_s = asyncio.get_running_loop().time()
        return check_reply(reply, num_tokens=request.prompt.num_tokens)

    async def _check_silence(self, failure: Failure) -> None:
        """After a broken connection: raise ServerLost when the server is gone, not just busy."""
        silence_s = asyncio.get_running_loop().time() - self._last_answer_s
        if silence_s > SERVER_SILENCE_S and not await self._client.is_answering():
            raise ServerLost(
                f"the server at {self._client.url} has not answered for {silence_s:.0f} s "
                f"({failure.detail}). {RESTART_ADVICE}"
            )

    async def _watch_server(self) -> None:
        """Raise ServerLost when a writer's process ends."""
        while True:
            for rank in self._target.ranks:
                if not is_alive(rank.ready):
                    raise ServerLost(
                        f"the server at {self._client.url} died: its process {rank.ready.pid} "
                        f"is gone. {RESTART_ADVICE}"
                    )
            await asyncio.sleep(ALIVE_INTERVAL_S)

    # --- shards ------------------------------------------------------------------------------

    async def _open_shards(self) -> None:
        """Make the movers; they go on with the shards that earlier sessions left open."""
        self._movers = [self._new_mover() for _ in range(self._options.num_movers)]
        movers = list(self._movers)
        for found in self._left.open_shards:
            if movers:
                await movers.pop().resume(found.shard, found.rows)
            else:  # this session has fewer movers
                await seal_left_open(self._settings, self._owner, found.shard, found.rows)

    def _new_mover(self) -> Mover:
        return Mover(
            self._settings,
            self._owner,
            next_number=self._take_shard_number,
            rows_left=lambda: max(1, self._counters.num_rows - self._counters.settled),
        )

    def _take_shard_number(self) -> int:
        self._next_shard += 1
        return self._next_shard - 1

    # --- housekeeping ------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            self._counters.in_flight = len(self._rids)
            self._counters.shm_bytes = self.budget.used_bytes
            self._reporter.update(self._counters)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _enforce_drain(self) -> None:
        """After a stop, let what is in flight end; but not for ever."""
        await self._stop.wait()
        self._reporter.note(
            f"stopping: {len(self._rids)} requests in flight get {DRAIN_S:.0f} s to end; "
            "interrupt again to stop at once"
        )
        await asyncio.sleep(DRAIN_S)
        raise Interrupted(
            f"stopped; what was in flight after {DRAIN_S:.0f} s is sent again next time"
        )

    async def _clean_up(self) -> None:
        """Leave nothing of ours under the dump root, whatever ended the run."""
        await asyncio.gather(*(self._client.abort(rid) for rid in self._rids))
        # Everything that is still there, or comes, is nobody's any more.
        with suppress(ServerError):
            for _ in range(10 if self._rids else 1):
                self._collector.sweep()
                await asyncio.sleep(0.05 if self._rids else 0)


async def _in_thread(rows: Iterator[Prompt | BadRow]) -> AsyncIterator[Prompt | BadRow]:
    """Read and tokenise on a thread of its own, one small batch ahead of the consumer."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def next_batch() -> list[Prompt | BadRow]:
        return list(islice(rows, READ_BATCH))

    try:
        ahead = loop.run_in_executor(thread, next_batch)
        while batch := await ahead:
            ahead = loop.run_in_executor(thread, next_batch)
            for row in batch:
                yield row
    finally:
        thread.shutdown(wait=True)


@contextmanager
def _stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`; a second one ends the process's run at once."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def handle() -> None:
        if stop.is_set():
            main.cancel("interrupted twice")
        stop.set()

    installed: list[signal.Signals] = []
    remove: Callable[[signal.Signals], object] = loop.remove_signal_handler
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError):  # not the main thread: no signals come here
            loop.add_signal_handler(number, handle)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            remove(number)

"""One process's work on a run: the tasks and what they share.

One task reads and tokenises; it admits each prompt to a task of its own, which sends it, waits
for its pieces and hands them to a mover. Everything in flight is bounded: requests by
`concurrency`, bytes under the dump root by the budget, tasks by both.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress

from extractor.admission import Admission, Room
from extractor.adoption import Adoptable, find_adoptable, whole
from extractor.budget import Budget
from extractor.client import Client
from extractor.collect import DumpPiece
from extractor.collector import remove_dumps_of_the_dead
from extractor.config import Identity, RunOptions
from extractor.errors import Interrupted
from extractor.exchange import Exchange
from extractor.mover import Movers, Syncs
from extractor.plan import Refusal, dump_bytes, rid_prefix
from extractor.policy import OnDuplicate
from extractor.preflight import Target, shm_budget
from extractor.progress import Reporter
from extractor.reading import in_thread, num_workers_for, prompts_of
from extractor.reconcile import Reconciled
from extractor.retry import Failure, Remedy, RetryPolicy
from extractor.runstate import RunState
from extractor.shard_format import sample_bytes
from extractor.shards import ShardSettings
from extractor.signals import stop_on_signals
from extractor.writers import scan_writers
from manifest.owner import StoreOwner
from manifest.records import Failed, Moved, Planned, Rejected
from manifest.states import ASKED_FOR, Event, Reason
from manifest.store import Store
from prompts.inputs import InputFile
from prompts.render import Renderer
from prompts.stream import read_prompts
from prompts.types import BadRow, Prompt

REPORT_INTERVAL_S = 0.5
#: After a signal, requests in flight get this long to end by themselves.
DRAIN_S = 25.0
#: Failed rows that are named as they happen; `extractor status` lists all.
SHOWN_FAILURES = 20
REJECTIONS_PER_COMMIT = 1000


class Session:
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
        state: RunState,
        left: Reconciled,
    ) -> None:
        self._options = options
        self._target = target
        self._identity = identity
        self._layout = identity.layout
        self._renderer = renderer
        self._owner = owner
        self._reporter = reporter
        self._state = state
        self._counters = state.counters
        self._policy = RetryPolicy(max_attempts=options.max_attempts)
        self._exchange = Exchange(
            options=options,
            client=client,
            target=target,
            owner=owner,
            counters=state.counters,
            run_id=state.run_id,
            layout=identity.layout,
            suspects=state.suspects,
            say=reporter.note,
        )
        self._settings = shard_settings(options, identity)
        self._left = left
        self._movers = Movers(
            self._settings,
            owner,
            count=options.num_movers,
            next_number=left.next_number,
            rows_left=lambda: max(1, self._counters.num_rows - self._counters.settled),
        )
        self.budget = Budget(
            shm_budget(target.ranks, options.shm_budget_bytes, limits=target.limits)
        )
        # A prompt's task outlives its request by the copy to the shard; twice as many tasks as
        # requests keep the server busy meanwhile.
        self._tasks = asyncio.Semaphore(2 * options.concurrency)
        self._running: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    @property
    def syncs(self) -> Syncs:
        """What making samples durable took."""
        return self._movers.syncs

    async def run(self, files: Sequence[InputFile]) -> None:
        """Settle every row that is not settled yet. Raises Interrupted after a signal."""
        await self._movers.open(self._left.open_shards)
        self._counters.started = time.monotonic()  # the speed is that of the work, not of its start
        with stop_on_signals(self._stop):
            await self._run_until_settled(files)
        if self._stop.is_set():
            raise Interrupted(
                f"stopped with {self._counters.settled} of {self._counters.num_rows} rows "
                "settled; the same command goes on"
            )

    async def _run_until_settled(self, files: Sequence[InputFile]) -> None:
        is_complete = False
        try:
            await self._run_tasks(files)
            is_complete = not self._stop.is_set()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise  # somebody else's cancellation
            raise Interrupted("stopped at once; what was in flight is sent again") from None
        finally:
            for ordinal in await self._exchange.close():
                self._counters.failed += 1
                self._reporter.note(
                    f"row {ordinal} is set aside ({Reason.KILLS_SERVER}): the server died twice "
                    "with it"
                )
            await self._movers.close(seal=is_complete)
            self._reporter.update(self._counters)
            self._reporter.close()

    async def _run_tasks(self, files: Sequence[InputFile]) -> None:
        async with asyncio.TaskGroup() as helpers:
            background = [
                helpers.create_task(self._report(), name="reporter"),
                helpers.create_task(self._enforce_drain(), name="drain"),
                helpers.create_task(self._exchange.watch.run(), name="server-watch"),
                *(
                    helpers.create_task(mover.run(), name=f"mover-{number}")
                    for number, mover in enumerate(self._movers.all)
                ),
            ]
            admission = await self._admission()
            await self._adopt(files, admission)
            # Only now: what nobody waits for, the collector removes.
            background.append(helpers.create_task(self._exchange.collector.run(), name="collector"))
            async with asyncio.TaskGroup() as work:
                await self._admit_all(files, admission, work)
            for task in background:
                task.cancel()

    # --- what earlier sessions left ----------------------------------------------------------

    async def _adopt(self, files: Sequence[InputFile], admission: Admission) -> None:
        """Store what an earlier session asked for and did not live to store; remove the rest."""
        root, run_id = self._options.dump_root, self._state.run_id
        ranks = [*self._target.ranks, *scan_writers(root).dead]
        adoptable = await asyncio.to_thread(
            find_adoptable,
            ranks,
            run_id=run_id,
            identity=self._identity,
            is_wanted=lambda ordinal: not self._state.is_settled(ordinal),
        )
        if adoptable:
            num_before = self._counters.stored
            await self._adopt_all(files, admission, adoptable)
            num_adopted = self._counters.stored - num_before
            self._reporter.note(f"{num_adopted} prompts had their dumps from an earlier session")
        remove_dumps_of_the_dead(root, rid_prefix=rid_prefix(run_id))

    async def _adopt_all(
        self, files: Sequence[InputFile], admission: Admission, adoptable: Adoptable
    ) -> None:
        rows = read_prompts(files, self._renderer, skip=lambda ordinal: ordinal not in adoptable)
        sources = {file.path: number for number, file in enumerate(files)}
        num_left = len(adoptable)
        async with asyncio.TaskGroup() as work:
            async for row in in_thread(rows):
                pieces = None
                judged = admission.judge(row)
                if isinstance(judged, Prompt):
                    pieces = whole(adoptable[row.ordinal], judged.num_tokens)
                if isinstance(judged, Prompt) and pieces is not None:
                    await self._tasks.acquire()
                    self._owner.post(planned_row(judged, row, sources[row.source]))
                    work.create_task(self._adopt_one(judged, pieces), name=f"adopt-{row.ordinal}")
                num_left -= 1
                if not num_left or self._stop.is_set():
                    return

    async def _adopt_one(self, prompt: Prompt, pieces: Sequence[DumpPiece]) -> None:
        try:
            attempts = self._state.attempts.get(prompt.ordinal, 0)
            self._owner.post(Moved(ordinal=prompt.ordinal, event=Event.ADOPT, attempts=attempts))
            if await self._movers.store(prompt, pieces, attempts=attempts) is None:
                self._state.settle(prompt.ordinal)
                self._count_stored(prompt)
            else:  # then it is asked for like any other
                self._owner.post(
                    Moved(ordinal=prompt.ordinal, event=Event.RETRY, attempts=attempts)
                )
        finally:
            self._tasks.release()

    # --- prompts -----------------------------------------------------------------------------

    async def _admission(self) -> Admission:
        return Admission(
            self._options.policy,
            self._target.limits,
            Room(layout=self._layout, budget_bytes=self.budget.total),
            seen=await self._seen_keys(),
        )

    async def _admit_all(
        self, files: Sequence[InputFile], admission: Admission, work: asyncio.TaskGroup
    ) -> None:
        sources = {file.path: number for number, file in enumerate(files)}
        rows_left = self._counters.num_rows - self._counters.settled_before
        with prompts_of(
            files,
            self._renderer,
            num_workers=num_workers_for(rows_left, self._options.tokenizer_workers),
            skip=self._state.is_settled,
        ) as rows:
            async for row in in_thread(rows):
                if self._stop.is_set():
                    return
                judged = admission.judge(row)
                if isinstance(judged, Refusal):
                    await self._reject(row, sources[row.source], judged)
                    continue
                await self._tasks.acquire()
                if self._stop.is_set():
                    return
                size = dump_bytes(judged.num_tokens, self._layout, self._target.limits)
                self._owner.post(planned_row(judged, row, sources[row.source]))
                if row.ordinal in self._state.suspects:
                    # The server died with it before: if it dies again, there must be no doubt why.
                    await self._all_done()
                    self._start(work, judged, size)
                    await self._all_done()
                else:
                    self._start(work, judged, size)

    def _start(self, work: asyncio.TaskGroup, prompt: Prompt, size_bytes: int) -> None:
        task = work.create_task(self._process(prompt, size_bytes), name=f"prompt-{prompt.ordinal}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _all_done(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _seen_keys(self) -> dict[bytes, int]:
        """The first row that gave each prompt so far; only where duplicates are left out."""
        if self._options.policy.on_duplicate is not OnDuplicate.SKIP:
            return {}

        def read(store: Store) -> dict[bytes, int]:
            seen: dict[bytes, int] = {}
            for ordinal, key in store.keys():
                seen.setdefault(bytes.fromhex(key), ordinal)
            return seen

        return await self._owner.call(read)

    async def _reject(self, row: Prompt | BadRow, source: int, refused: Refusal) -> None:
        self._owner.post(
            Rejected(
                ordinal=row.ordinal,
                source=source,
                line=row.line,
                label=row.label,
                part=row.part,
                reason=refused.reason,
                detail=refused.detail,
                key=row.key if isinstance(row, Prompt) else None,
                num_tokens=row.num_tokens if isinstance(row, Prompt) else None,
            )
        )
        self._count_failed(row, refused.reason, refused.detail)
        if self._counters.failed % REJECTIONS_PER_COMMIT == 0:
            # Nothing else holds back the reading of a file of bad rows.
            await self._owner.drain()

    async def _process(self, prompt: Prompt, size_bytes: int) -> None:
        """Attempts, until the prompt is stored or given up, or the run stops."""
        try:
            attempt = self._state.attempts.get(prompt.ordinal, 0)
            setbacks = 0  # of this session
            counted = 0  # setbacks that were this prompt's own
            telling = 0  # setbacks while others were served, or its own
            while not self._stop.is_set():
                attempt += 1
                num_served = self._exchange.watch.num_served
                async with self.budget.hold(size_bytes):
                    if self._stop.is_set():
                        return
                    failure = await self._attempt(prompt, attempt)
                if failure is None:
                    self._count_stored(prompt)
                    return
                setbacks += 1
                counted += not failure.is_not_counted
                # Where nobody was served meanwhile, a refusal tells nothing even of this prompt.
                if not failure.is_not_counted or self._exchange.watch.num_served > num_served:
                    telling += 1
                remedy = self._policy.remedy(failure, num_counted=counted, num_setbacks=telling)
                if remedy is Remedy.GIVE_UP:
                    self._give_up(prompt, failure, attempt)
                    return
                self._counters.retried += 1
                self._owner.post(Moved(ordinal=prompt.ordinal, event=Event.RETRY, attempts=attempt))
                delay_s = self._policy.delay_s(setbacks, chance=random.random())
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._stop.wait()
        finally:
            self._tasks.release()

    def _count_stored(self, prompt: Prompt) -> None:
        self._counters.stored += 1
        self._counters.tokens += prompt.num_tokens
        self._counters.stored_bytes += sample_bytes(prompt.num_tokens, self._layout)

    def _give_up(self, prompt: Prompt, failure: Failure, attempt: int) -> None:
        self._exchange.forget(prompt.ordinal)
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
        if reason in ASKED_FOR:
            return
        if self._counters.failed <= SHOWN_FAILURES:
            self._reporter.note(f"{row.source}:{row.line}: {reason}: {detail}")
        elif self._counters.failed == SHOWN_FAILURES + 1:
            self._reporter.note("… further failed rows: see `extractor status`")

    async def _attempt(self, prompt: Prompt, attempt: int) -> Failure | None:
        """Send once; None when the sample is durable, else why this attempt gave none."""
        outcome = await self._exchange.fetch(prompt, attempt)
        if isinstance(outcome, Failure):
            return outcome
        self._owner.post(Moved(ordinal=prompt.ordinal, event=Event.DUMP, attempts=attempt))
        return await self._movers.store(prompt, outcome, attempts=attempt)

    # --- housekeeping ------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            self._counters.in_flight = len(self._exchange.rids)
            self._counters.shm_bytes = self.budget.used
            self._reporter.update(self._counters)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _enforce_drain(self) -> None:
        """After a stop, let what is in flight end; but not for ever."""
        await self._stop.wait()
        self._reporter.note(
            f"stopping: {len(self._exchange.rids)} requests in flight get {DRAIN_S:.0f} s to end; "
            "interrupt again to stop at once"
        )
        await asyncio.sleep(DRAIN_S)
        raise Interrupted(
            f"stopped; what was in flight after {DRAIN_S:.0f} s is sent again next time"
        )


def planned_row(prompt: Prompt, row: Prompt | BadRow, source: int) -> Planned:
    """What the manifest is told of a prompt; `row`: the same before it was cut."""
    detail = None
    if isinstance(row, Prompt) and row.num_tokens > prompt.num_tokens:
        detail = f"cut from {row.num_tokens} tokens"
    return Planned(
        ordinal=prompt.ordinal,
        source=source,
        line=prompt.line,
        label=prompt.label,
        part=prompt.part,
        key=prompt.key,
        num_tokens=prompt.num_tokens,
        num_trained=prompt.num_trained,
        alterations=tuple(alteration.value for alteration in prompt.alterations),
        detail=detail,
    )


def shard_settings(options: RunOptions, identity: Identity) -> ShardSettings:
    """What every shard of the run has in common."""
    return ShardSettings(
        directory=options.shards_path,
        identity=identity,
        shard_bytes=options.shard_bytes,
        file_mode=options.file_mode,
    )

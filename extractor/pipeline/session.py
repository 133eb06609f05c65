"""One process's work on a run: the tasks and what they share.

One task reads and tokenises; it admits each prompt to a task of its own, which sends it, waits
for its pieces and hands them to a mover. Everything in flight is bounded: requests by each server's
limiter, bytes under the dump root by the budget, tasks by both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from extractor.core.admission import Admission, Refusal, Room
from extractor.core.counters import Moment
from extractor.core.errors import Interrupted
from extractor.core.events import Reporter
from extractor.core.identity import Identity
from extractor.core.request import dump_bytes
from extractor.core.rids import rid_prefix
from extractor.core.row_policy import OnDuplicate
from extractor.core.run_options import RunOptions
from extractor.dispatch.budget import Budget
from extractor.dispatch.places import Place, Places
from extractor.dispatch.prompt_task import Attempts
from extractor.dispatch.provenance import Provenance
from extractor.dispatch.retry import RetryPolicy
from extractor.dispatch.row_recorder import Ledger
from extractor.dispatch.server_pool import Fleet, Member
from extractor.dumps.adoption import Adoptable, find_adoptable, whole
from extractor.dumps.collector import remove_dumps_of_the_dead
from extractor.dumps.discovery import scan_writers
from extractor.dumps.dump_reader import DumpPiece, disown
from extractor.intake.prompt_stream import in_thread, num_workers_for, prompts_of
from extractor.pipeline.resume import RunState
from extractor.servers.shm_budget import shm_budget
from extractor.shards.mover import Movers
from extractor.shards.recovery import Reconciled
from extractor.shards.writer import ShardSettings
from extractor.system.signals import stop_on_signals
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from prompts.inputs import InputFile
from prompts.render import Renderer
from prompts.stream import read_prompts
from prompts.types import Prompt

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
#: Time for requests in flight to finish after a stop signal. The remaining shutdown steps share the
#: rest of `signals.END_S`.
DRAIN_S = 9.0


class Session:
    """One process's work on a run: the tasks and what they share."""

    def __init__(
        self,
        *,
        options: RunOptions,
        members: Sequence[Member],
        identity: Identity,
        provenance: Provenance,
        renderer: Renderer,
        owner: StoreOwner,
        reporter: Reporter,
        state: RunState,
        left: Reconciled,
    ) -> None:
        self._options = options
        self._layout = identity.layout
        self._provenance = provenance
        self._renderer = renderer
        self._owner = owner
        self._reporter = reporter
        self._state = state
        self._counters = state.counters
        self._left = left
        self._stop = asyncio.Event()
        self._places = Places()
        self._fleet = Fleet(
            options=options,
            members=members,
            layout=self._layout,
            provenance=provenance,
            owner=owner,
            counters=state.counters,
            run_id=state.run_id,
            suspects=state.suspects,
            report=reporter.report,
            resized=self._places.resize,
        )
        self._limits = self._fleet.limits
        self.budget = Budget(
            shm_budget(self._fleet.ranks, options.load.shm_budget_bytes, limits=self._limits)
        )
        self._ledger = Ledger(owner, state.counters, reporter, self._layout)
        self._movers = Movers(
            shard_settings(options, identity),
            owner,
            count=options.load.num_movers,
            next_number=left.next_number,
            rows_left=lambda: max(1, self._counters.rows.left),
            count_stored=self._ledger.count_stored,
            server_of=provenance.number_of,
            stages=self._counters.stages,
            budget_bytes=self.budget.total,
        )
        self._attempts = Attempts(
            fleet=self._fleet,
            movers=self._movers,
            ledger=self._ledger,
            budget=self.budget,
            policy=RetryPolicy(max_attempts=options.patience.max_attempts),
            stop=self._stop,
        )

    async def run(self, files: Sequence[InputFile]) -> None:
        """Settle every row that is not settled yet. Raises Interrupted after a signal."""
        await self._movers.open(self._left.open_shards)
        if not self._counters.sent:  # the speed is that of the work, not of its start
            self._counters.pace.started = time.monotonic()
        with stop_on_signals(self._stop):
            await self._run_until_settled(files)
        if self._stop.is_set():
            raise Interrupted(
                f"stopped with {self._counters.rows.settled:,} of {self._counters.rows.total:,} "
                "rows settled; the same command goes on"
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
            for convicted in await self._fleet.close():
                self._ledger.give_up(
                    convicted.prompt, convicted.failure, attempts=convicted.attempts
                )
            await self._movers.close(seal=is_complete)
            self._observe()
            self._reporter.update(self._counters)
            self._reporter.close()

    async def _run_tasks(self, files: Sequence[InputFile]) -> None:
        async with asyncio.TaskGroup() as helpers:
            background = [
                helpers.create_task(self._report(), name="reporter"),
                helpers.create_task(self._enforce_drain(), name="drain"),
                *(
                    helpers.create_task(mover.run(), name=f"mover-{number}")
                    for number, mover in enumerate(self._movers.all)
                ),
            ]
            admission = await self._admission()
            await self._adopt(files, admission)
            # Only now: what nobody waits for, the collectors remove.
            background.append(helpers.create_task(self._fleet.run(), name="fleet"))
            async with asyncio.TaskGroup() as work:
                await self._admit_all(files, admission, work)
            for task in background:
                task.cancel()

    # --- what earlier sessions left ----------------------------------------------------------

    async def _adopt(self, files: Sequence[InputFile], admission: Admission) -> None:
        """Store what an earlier session asked for and did not live to store; remove the rest."""
        root, run_id = self._options.servers.dump_root, self._state.run_id
        ranks = [*self._fleet.ranks, *scan_writers(root).dead]
        if self._state.is_new:
            await asyncio.to_thread(disown, ranks)
        adoptable = await asyncio.to_thread(
            find_adoptable,
            ranks,
            run_id=run_id,
            layout=self._layout,
            is_fit=self._provenance.is_fit,
            is_wanted=lambda ordinal: not self._state.is_settled(ordinal),
        )
        if adoptable:
            num_before = self._counters.rows.stored
            await self._adopt_all(files, admission, adoptable)
            num_adopted = self._counters.rows.stored - num_before
            self._reporter.report(f"{num_adopted} prompts had their dumps from an earlier session")
        remove_dumps_of_the_dead(root, rid_prefix=rid_prefix(run_id), known=ranks)

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
                    place = await self._places.take(self._dump_bytes(judged))
                    self._ledger.plan(judged, row, source=sources[row.origin.source])
                    logger.info("adopting row=%d pieces=%d", row.ordinal, len(pieces))
                    adopting = self._adopt_one(judged, pieces, place)
                    work.create_task(adopting, name=f"adopt-{row.ordinal}")
                num_left -= 1
                if not num_left or self._stop.is_set():
                    return

    async def _adopt_one(self, prompt: Prompt, pieces: Sequence[DumpPiece], place: Place) -> None:
        try:
            attempts = self._state.attempts.get(prompt.ordinal, 0)
            if await self._attempts.adopt(prompt, pieces, attempts=attempts):
                self._state.settle(prompt.ordinal)
        finally:
            self._places.give_back(place)

    # --- prompts -----------------------------------------------------------------------------

    async def _admission(self) -> Admission:
        return Admission(
            self._options.input.policy,
            self._limits,
            Room(layout=self._layout, budget_bytes=self.budget.total),
            seen=await self._seen_keys(),
        )

    async def _admit_all(
        self, files: Sequence[InputFile], admission: Admission, work: asyncio.TaskGroup
    ) -> None:
        sources = {file.path: number for number, file in enumerate(files)}
        rows_left = self._counters.rows.left
        with prompts_of(
            files,
            self._renderer,
            num_workers=num_workers_for(rows_left, self._options.input.tokenizer_workers),
            skip=self._state.is_settled,
        ) as rows:
            async for row in in_thread(rows):
                if self._stop.is_set():
                    return
                judged = admission.judge(row)
                if isinstance(judged, Refusal):
                    logger.info(
                        "refused row=%d reason=%s: %s", row.ordinal, judged.reason, judged.detail
                    )
                    await self._ledger.reject(row, judged, source=sources[row.origin.source])
                    continue
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug(
                        "admitted row=%d tokens=%d origin=%s",
                        row.ordinal, judged.num_tokens, row.origin,
                    )  # fmt: skip
                place = await self._places.take(self._dump_bytes(judged))
                if self._stop.is_set():
                    return
                logger.debug("planned row=%d", row.ordinal)
                self._ledger.plan(judged, row, source=sources[row.origin.source])
                work.create_task(self._settle(judged, place), name=f"prompt-{judged.ordinal}")

    async def _settle(self, prompt: Prompt, place: Place) -> None:
        try:
            await self._attempts.settle(
                prompt,
                self._dump_bytes(prompt),
                attempts_before=self._state.attempts.get(prompt.ordinal, 0),
            )
        finally:
            self._places.give_back(place)

    def _dump_bytes(self, prompt: Prompt) -> int:
        return dump_bytes(prompt.num_tokens, self._layout, self._limits)

    async def _seen_keys(self) -> dict[bytes, int]:
        """The first row that gave each prompt so far; only where duplicates are left out."""
        if self._options.input.policy.on_duplicate is not OnDuplicate.SKIP:
            return {}

        def read(store: Store) -> dict[bytes, int]:
            seen: dict[bytes, int] = {}
            for ordinal, key in store.keys():
                seen.setdefault(bytes.fromhex(key), ordinal)
            return seen

        return await self._owner.call(read)

    # --- housekeeping ------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            self._observe()
            self._reporter.update(self._counters)
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _observe(self) -> None:
        self._counters.observe(
            Moment(
                servers=tuple(member.now for member in self._fleet.members),
                budget_bytes=self.budget.total,
                shm_bytes=self.budget.used,
                peak_shm_bytes=self.budget.peak,
                budget_queue=self.budget.num_waiting,
                mover_queue=self._movers.backlog,
            )
        )

    async def _enforce_drain(self) -> None:
        """After a stop, let what is in flight end; but not for ever."""
        await self._stop.wait()
        self._fleet.send_no_more()
        self._reporter.report(
            f"stopping: {self._fleet.num_in_flight} requests in flight get {DRAIN_S:.0f} s to end; "
            "interrupt again to stop at once"
        )
        await asyncio.sleep(DRAIN_S)
        raise Interrupted(
            f"stopped; what was in flight after {DRAIN_S:.0f} s is sent again next time"
        )


def shard_settings(options: RunOptions, identity: Identity) -> ShardSettings:
    """What every shard of the run has in common."""
    return ShardSettings(
        directory=options.output.shards_path,
        identity=identity,
        shard_bytes=options.output.shard_bytes,
        file_mode=options.output.file_mode,
    )

"""One process's work on a data set: its tasks, and how they are stopped.

One task reads and tokenises. It reserves the bytes of each prompt's dumps and gives the prompt a
task of its own, which sends it, waits for its dumps, and hands them to a mover. Everything in
progress is bounded by two gates: the byte budget, and each server's slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from extractor.core.admission import Admission, Refusal, Room
from extractor.core.counters import Moment
from extractor.core.errors import Interrupted
from extractor.core.events import Reporter
from extractor.core.request import dump_bytes
from extractor.core.row_policy import OnDuplicate
from extractor.core.run_options import RunOptions
from extractor.core.timings import Timings
from extractor.dispatch.budget import Budget, max_prompts
from extractor.dispatch.prompt_task import PromptTasks
from extractor.dispatch.retry import RetryPolicy
from extractor.dispatch.row_recorder import RowRecorder
from extractor.dispatch.server import Server
from extractor.dispatch.server_pool import ServerPool
from extractor.dispatch.suspects import Suspects
from extractor.intake.prompt_stream import in_thread, num_workers_for, prompts_of
from extractor.pipeline.adopter import Adopter
from extractor.pipeline.open_data_set import OpenDataSet
from extractor.servers.shm_budget import shm_budget
from extractor.shards.mover_pool import MoverPool
from extractor.shards.writer import ShardSettings
from extractor.system.signals import stop_on_signals
from manifest.store import Store


class Session:
    """From the first prompt to the last, or to a stop."""

    def __init__(
        self,
        *,
        options: RunOptions,
        data_set: OpenDataSet,
        servers: Sequence[Server],
        reporter: Reporter,
        timings: Timings,
    ) -> None:
        """`servers`: at least one has a target."""
        self._options = options
        self._data_set = data_set
        self._reporter = reporter
        self._timings = timings
        self._stop = asyncio.Event()
        self._counters = data_set.state.counters
        layout = data_set.identity.layout
        recorder = RowRecorder(
            data_set.owner,
            self._counters,
            reporter,
            files=data_set.files,
            server_of=data_set.provenance.number_of,
            rejections_per_commit=timings.store.rejections,
        )
        self._pool = ServerPool(
            options=options,
            servers=servers,
            provenance=data_set.provenance,
            recorder=recorder,
            suspects=Suspects(data_set.state.suspects),
            run_id=data_set.state.run_id,
            timings=timings,
        )
        limits = self._pool.limits
        self._budget = Budget(
            shm_budget(self._pool.ranks, options.load.shm_budget_bytes, limits=limits),
            max_holders=max_prompts(
                self._pool.request_limit, group_samples=timings.store.group_samples
            ),
        )
        self._movers = MoverPool(
            ShardSettings(output=options.output, identity=data_set.identity),
            data_set.owner,
            recorder,
            self._counters,
            count=options.load.num_movers,
            next_number=data_set.left.next_number,
            budget_bytes=self._budget.total,
            timings=timings.store,
        )
        self._tasks = PromptTasks(
            pool=self._pool,
            movers=self._movers,
            recorder=recorder,
            budget=self._budget,
            dump_bytes=lambda num_tokens: dump_bytes(num_tokens, layout, limits),
            policy=RetryPolicy(
                max_attempts=options.patience.max_attempts,
                base_delay_s=timings.dispatch.retry_base_s,
                max_delay_s=timings.dispatch.retry_max_s,
            ),
            stop=self._stop,
        )

    async def run(self) -> None:
        """Settle every row that is not settled yet. Raises Interrupted after a signal."""
        await self._movers.open(self._data_set.left.open_shards)
        if not self._counters.sent:  # the speed is that of the work, not of its start
            self._counters.pace.restart()
        with stop_on_signals(self._stop):
            await self._run_until_settled()
        if self._stop.is_set():
            rows = self._counters.rows
            raise Interrupted(
                f"stopped with {rows.settled:,} of {rows.total:,} "
                "rows settled; the same command goes on"
            )

    async def _run_until_settled(self) -> None:
        is_complete = False
        try:
            await self._run_tasks()
            is_complete = not self._stop.is_set()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise  # somebody else's cancellation
            raise Interrupted("stopped at once; what was in flight is sent again") from None
        finally:
            await self._pool.close()
            await self._movers.close(seal=is_complete)
            self._observe()
            self._reporter.close()

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as helpers:
            background = [
                helpers.create_task(self._keep_observing(), name="reporter"),
                helpers.create_task(self._enforce_drain(), name="drain"),
                *(
                    helpers.create_task(mover.run(), name=f"mover-{number}")
                    for number, mover in enumerate(self._movers.all)
                ),
            ]
            admission = await self._admission()
            adopter = Adopter(
                data_set=self._data_set,
                tasks=self._tasks,
                dump_root=self._options.servers.dumps,
                report=self._reporter.report,
            )
            await adopter.run(admission, self._pool.ranks)
            # Only now: the collectors remove every dump that nobody waits for.
            background.append(helpers.create_task(self._pool.run(), name="servers"))
            async with asyncio.TaskGroup() as work:
                await self._send_all(admission, work)
            for task in background:
                task.cancel()

    async def _admission(self) -> Admission:
        policy = self._options.input.policy
        layout = self._data_set.identity.layout
        return Admission(
            policy,
            self._pool.limits,
            Room(layout=layout, budget_bytes=self._budget.total),
            seen=await self._data_set.owner.call(_seen_keys)
            if policy.on_duplicate is OnDuplicate.SKIP
            else None,
        )

    async def _send_all(self, admission: Admission, work: asyncio.TaskGroup) -> None:
        state = self._data_set.state
        wanted = self._options.input.tokenizer_workers
        with prompts_of(
            self._data_set.files,
            self._data_set.renderer,
            num_workers=num_workers_for(self._counters.rows.left, wanted),
            skip=state.is_settled,
        ) as rows:
            async for row in in_thread(rows, self._timings.dispatch):
                if self._stop.is_set():
                    return
                judged = admission.judge(row)
                if isinstance(judged, Refusal):
                    await self._tasks.recorder.reject(row, judged)
                    continue
                attempts_before = state.attempts.get(judged.ordinal, 0)
                settle = partial(self._tasks.settle, judged, attempts_before=attempts_before)
                await self._tasks.start(work, judged, row, settle=settle)

    # --- housekeeping ------------------------------------------------------------------------

    async def _keep_observing(self) -> None:
        while True:
            self._observe()
            await asyncio.sleep(self._timings.status.report_interval_s)

    def _observe(self) -> None:
        self._counters.observe(
            Moment(
                servers=tuple(server.now for server in self._pool.servers),
                budget_bytes=self._budget.total,
                shm_bytes=self._budget.used,
                peak_shm_bytes=self._budget.peak,
                budget_queue=self._budget.num_waiting,
                mover_queue=self._movers.backlog,
            )
        )
        self._reporter.update(self._counters)

    async def _enforce_drain(self) -> None:
        """After a stop, give what is in flight a limited time to end."""
        await self._stop.wait()
        drain_s = self._timings.stop.drain_s
        self._pool.send_no_more()
        self._reporter.report(
            f"stopping: {self._pool.num_in_flight} requests in flight get {drain_s:.0f} s to end; "
            "interrupt again to stop at once"
        )
        await asyncio.sleep(drain_s)
        raise Interrupted(
            f"stopped; what was in flight after {drain_s:.0f} s is sent again next time"
        )


def _seen_keys(store: Store) -> dict[bytes, int]:
    """The first row that gave each prompt so far."""
    seen: dict[bytes, int] = {}
    for ordinal, key in store.keys():
        seen.setdefault(bytes.fromhex(key), ordinal)
    return seen

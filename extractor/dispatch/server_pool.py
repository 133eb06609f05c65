"""The servers of a run: prompts go to those that are up, and one that was lost may come back.

What a lost server had in flight is sent to the others. Its address is polled, and whatever answers
there is used once it has passed the checks of the run's start. The run ends with the last server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from extractor.core.errors import (
    ExtractorError,
    ServerError,
    ServerGone,
    ServerUnreachable,
    first_known,
)
from extractor.core.events import ReportLine
from extractor.core.failure import Failure
from extractor.core.request import Limits
from extractor.core.rids import rid_prefix
from extractor.core.run_options import RunOptions
from extractor.core.timings import Timings
from extractor.dispatch.connection import Connection, ConnectionSettings
from extractor.dispatch.health import Health, HealthState
from extractor.dispatch.limiter import Limiter, default_limit
from extractor.dispatch.monitor import Monitor
from extractor.dispatch.provenance import Provenance
from extractor.dispatch.row_recorder import RowRecorder
from extractor.dispatch.scheduler import Lane, Scheduler, Slot
from extractor.dispatch.server import Server, connections_each
from extractor.dispatch.suspects import Suspects
from extractor.dumps.collector import Collector
from extractor.dumps.discovery import require_dump_directory
from extractor.dumps.dump_reader import DumpPiece, Rank
from extractor.servers.probe import require_probe
from extractor.servers.target import (
    Target,
    check_compatible,
    require_no_stricter,
    require_target,
)
from prompts.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """One attempt that gave no sample."""

    failure: Failure
    others_served: bool  # meanwhile, by the same server


class ServerPool:
    """Sends prompts to the servers of a run."""

    def __init__(
        self,
        *,
        options: RunOptions,
        servers: Sequence[Server],
        provenance: Provenance,
        recorder: RowRecorder,
        suspects: Suspects,
        run_id: str,
        timings: Timings,
    ) -> None:
        """`servers`: at least one has a target."""
        self.servers = tuple(servers)
        self._options = options
        self._provenance = provenance
        self._recorder = recorder
        self._suspects = suspects
        self._timings = timings
        self._scheduler = Scheduler(suspects.is_suspect)
        self._settings = ConnectionSettings(
            run_id=run_id,
            session_id=secrets.token_hex(6),
            counters=recorder.counters,
            dump_timeout_s=options.patience.dump_timeout_s,
            death_shows_s=timings.dispatch.death_shows_s,
        )
        targets = [server.target for server in self.servers if server.target is not None]
        #: A target that each server must match, and the limits that every prompt was admitted by.
        self.reference = targets[0]
        self.limits = Limits.strictest([target.limits for target in targets])
        for server in self.servers:
            if server.target is not None:
                self._connect(server, server.target)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The writers of all servers that are up."""
        return tuple(rank for connection in self._up for rank in connection.target.ranks)

    @property
    def request_limit(self) -> int:
        """Requests that all servers of the run may have at a time, also those that are away."""
        known = [connection.lane.health.limiter.max_requests for connection in self._up]
        return sum(known) + max(known) * (len(self.servers) - len(known))

    @property
    def num_in_flight(self) -> int:
        return self._scheduler.num_in_flight

    @property
    def _up(self) -> list[Connection]:
        return [server.connection for server in self.servers if server.connection is not None]

    @property
    def _report(self) -> ReportLine:
        return self._recorder.report

    async def run(self) -> None:
        """Watch the servers and their dumps until cancelled.

        Raises ServerError when the last server is lost, SpaceError.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(self._keep(server), name=f"server-{server.url}")

    async def fetch(
        self, prompt: Prompt, attempt: int, served: dict[Connection, int]
    ) -> Sequence[DumpPiece] | FailedAttempt | None:
        """Send `prompt` once, to one server; its pieces, or why this attempt gave none.

        `served`: what each server had served when this prompt's last attempt there ended; updated.
        None if there is nothing more to do: the prompt was convicted of killing servers, or
        `send_no_more` was called before it was sent. Whoever takes the pieces owns their files.
        """
        ordinal = prompt.ordinal
        for connection in self._up:
            served.setdefault(connection, connection.lane.health.num_served)
        while not self._suspects.is_convicted(ordinal):
            slot = await self._scheduler.take(ordinal, prompt.num_tokens)
            if slot is None:
                return None
            try:
                found = await self._connection_of(slot)
                if found is None or self._suspects.is_convicted(ordinal):
                    continue
                # One server is blamed for a prompt: the last one that it was sent to.
                self._forget_elsewhere(ordinal, found)
                outcome = await found.fetch(prompt, attempt, slot)
            finally:
                slot.release()
            if not isinstance(outcome, Failure):
                self._suspects.clear(ordinal)
                return outcome
            num_served = found.lane.health.num_served
            others_served = num_served > served.get(found, num_served)
            served[found] = num_served
            if not self._suspects.is_convicted(ordinal):
                return FailedAttempt(failure=outcome, others_served=others_served)
        return None

    async def _connection_of(self, slot: Slot) -> Connection | None:
        """The connection that a slot is for; None if its server is lost, or another one by now."""
        connection = next((found for found in self._up if found.lane is slot.lane), None)
        if connection is None:
            return None
        if not connection.monitor.is_same_server():
            slot.release()
            await connection.has_ended.wait()
            return None
        if slot.is_alone:
            await self._recorder.flush()  # its deaths must be durable before the next one
        return None if connection.has_ended.is_set() else connection

    def _forget_elsewhere(self, ordinal: int, connection: Connection) -> None:
        for other in self._up:
            if other is not connection:
                other.forget(ordinal)

    def send_no_more(self) -> None:
        """What is in flight may end; what waits for a slot is not sent."""
        self._scheduler.close()

    def forget(self, ordinal: int) -> None:
        """The prompt is given up."""
        self._suspects.clear(ordinal)
        for connection in self._up:
            connection.forget(ordinal)

    async def close(self) -> None:
        """Leave nothing of ours with the servers or under the dump root, whatever ended the run."""
        starts = (start for server in self.servers for start in server.starts)
        await asyncio.gather(*(start.close() for start in starts))

    # --- servers that come and go ------------------------------------------------------------

    async def _keep(self, server: Server) -> None:
        while True:
            if server.connection is None:
                self._connect(server, await self._proven_again(server))
                self._report(
                    f"{server.url} passed the probe; resuming",
                    event="server_back",
                    server=server.url,
                )
            assert server.connection is not None
            try:
                await server.connection.run()
            except ExceptionGroup as group:
                error = first_known(group)
                if not isinstance(error, ServerError):
                    raise
                await self._lose(server, server.connection, error)

    def _connect(self, server: Server, target: Target) -> None:
        server.target = target
        # Dumps that an earlier connection to the same start handed over must not be found again:
        # they may be waiting for their copy.
        boot_id = target.ready.boot_id
        collectors = [
            start.collector for start in server.starts if start.target.ready.boot_id == boot_id
        ]
        collector = (
            collectors[-1]
            if collectors
            else Collector(
                target.ranks,
                rid_prefix=rid_prefix(self._settings.run_id),
                timings=self._timings.collect,
            )
        )
        lane = Lane(health=Health(self._limiter(target), self._timings.health))
        monitor = Monitor(
            client=server.client,
            target=target,
            health=lane.health,
            collector=collector,
            run_id=self._settings.run_id,
            timings=self._timings,
            report=self._report,
            wake=self._scheduler.wake,
        )
        server.connection = Connection(
            self._settings,
            client=server.client,
            target=target,
            collector=collector,
            lane=lane,
            monitor=monitor,
        )
        server.starts.append(server.connection)
        self._scheduler.add(lane)

    def _limiter(self, target: Target) -> Limiter:
        if self._options.load.concurrency is not None:
            return Limiter(self._options.load.concurrency)
        connections = connections_each(len(self.servers))
        most = default_limit(target.facts.max_requests, connections=connections)
        return Limiter(most, kind="auto")

    async def _lose(self, server: Server, connection: Connection, error: ServerError) -> None:
        # In this order, and without a pause: whoever waits must find everything decided.
        server.connection = None
        has_died = (
            isinstance(error, ServerGone)
            and connection.lane.health.state is not HealthState.STOPPING
        )
        unanswered = connection.end()
        if has_died:
            convicted = self._suspects.judge(unanswered)
            for found in unanswered:
                if found is convicted:
                    sentence = self._suspects.sentence(found.ordinal)
                    self._recorder.give_up(found.prompt, sentence, attempts=found.attempts)
                else:
                    self._recorder.lose(found.prompt, attempts=found.attempts)
        self._scheduler.remove(connection.lane)
        await connection.abandon()
        if not self._up:
            if len(self.servers) > 1:
                urls = ", ".join(other.url for other in self.servers)
                self._report(f"no server is left of {urls}")
            raise error
        self._report(
            f"{error.what}. The run goes on with "
            f"{', '.join(other.url for other in self.servers if other.connection is not None)}, "
            f"and uses {server.url} again when a server is back there.",
            event="server_lost",
            level="warning",
            server=server.url,
        )

    async def _proven_again(self, server: Server) -> Target:
        """Wait until a server that fits answers at the address."""
        reported = ""
        while True:
            try:
                return await self._proven(server)
            except ServerUnreachable:
                pass  # reported when it was lost
            except ExtractorError as error:
                if str(error) != reported:
                    reported = str(error)
                    self._report(
                        f"{server.url} is not used: {reported}",
                        event="server_unfit",
                        level="warning",
                        server=server.url,
                    )
            for start in server.starts:
                start.tidy()
            await asyncio.sleep(self._timings.dispatch.return_pause_s)

    async def _proven(self, server: Server) -> Target:
        """The server at the address, checked as at the start of the run. Raises ExtractorError."""
        target = await require_target(server.client, self._options)
        for other in (self.reference, *(connection.target for connection in self._up)):
            check_compatible(other, target)
        require_no_stricter(self.limits, target)
        require_dump_directory(target.ranks)
        if await server.client.is_draining():  # a probe would only keep it from its end
            raise ServerUnreachable(f"{server.url} is shutting down")
        self._provenance.check(target)
        canary = await require_probe(
            server.client,
            target,
            run_id=self._settings.run_id,
            canary_ids=self._provenance.canary_ids,
            timings=self._timings,
        )
        await self._provenance.add(target, canary)
        return target

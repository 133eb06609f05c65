"""The servers of a run: prompts are spread over those that are up; one that went may come back.

A server that dies, or serves nothing for too long, leaves the fleet; what it had not answered is
suspect (below) and goes to the others with all the rest. Its address is asked again and again, and
whatever answers there is used when it is proven as at the start of the run: the same model and
layout, a probe whose dump arrives. When the last one goes, the run ends with the error of that one.

A prompt whose request broke off stays with its server until that has answered it or is given up, so
that whether it killed the server is known before another is risked. From then on it is a suspect:
it is sent with nothing beside it, and if that server dies as well, it is set aside.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from extractor.client import Client
from extractor.collect import Rank
from extractor.collector import Collected
from extractor.concurrency import MOST_LIMIT, Auto, Fixed, Limiter
from extractor.config import Layout, RunOptions
from extractor.errors import (
    ExtractorError,
    ServerError,
    ServerGone,
    ServerUnreachable,
    UsageError,
    first_known,
)
from extractor.exchange import Exchange, Unanswered
from extractor.measurements import Counters, ServerNow
from extractor.plan import Limits
from extractor.preflight import Target, require_dump_directory, require_probe
from extractor.progress import Say
from extractor.provenance import Provenance
from extractor.retry import Failure, is_convicted
from extractor.tables import counted
from extractor.targets import require_alike, require_no_stricter, require_target
from extractor.turns import Turns
from manifest.records import Lost
from manifest.states import Reason
from manifest.writer_thread import StoreOwner
from prompts.types import Prompt

#: Open files of a run besides the connections for prompts: about 20, two for each mover, four for
#: each tokenizer process, and connections for health checks.
OTHER_FILES = 128
#: Between two looks whether a server that is away has come back.
RETURN_PAUSE_S = 2.0


@dataclass(eq=False, kw_only=True)
class Member:
    """One server of a run, by its address, through all its starts."""

    client: Client
    target: Target | None  # as it was proven last; None: it has not answered yet
    exchange: Exchange | None = None  # None while it is away
    starts: list[Exchange] = field(default_factory=list)  # each that prompts were sent to
    num_before: int = 0  # prompts that it answered before all servers went and one came back

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def num_prompts(self) -> int:
        """It answered, in this session."""
        return self.num_before + sum(start.num_prompts for start in self.starts)

    @property
    def now(self) -> ServerNow:
        gate = None if self.exchange is None else self.exchange.watch.gate
        return ServerNow(
            url=self.url,
            is_up=gate is not None and gate.is_open,
            in_flight=0 if gate is None else gate.num_in_flight,
            request_limit=0 if gate is None else gate.limit,
            num_prompts=self.num_prompts,
        )

    def to_text(self) -> str:
        """How many requests it had at a time, for the end of a run."""
        if not self.starts:
            if self.num_before:
                return f"{self.num_before:,} prompts; not used since it went"
            return "it was not used" if self.client.has_answered else "it never answered"
        limiter = self.starts[-1].watch.limiter
        text = f"{limiter.limit} at a time ({limiter.kind})"
        if isinstance(limiter, Fixed) and limiter.limit < limiter.room:
            text = f"{limiter.room} at a time (fixed), {limiter.limit} after refusals"
        text += f"; {self.num_prompts:,} prompts"
        if len(self.starts) > 1:
            text += f"; it came back, {counted(len(self.starts), 'start')}"
        return text

    def to_document(self) -> dict[str, Any]:
        """What it did in this session, for `extractor run --json`."""
        return {
            "url": self.url,
            "concurrency": self.starts[-1].watch.limiter.limit if self.starts else None,
            "concurrency_is": self.starts[-1].watch.limiter.kind if self.starts else None,
            "starts": [
                {
                    "boot_id": start.target.ready.boot_id,
                    "prompts": start.num_prompts,
                    "tokens": start.num_tokens,
                }
                for start in self.starts
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Conviction:
    """A prompt that is set aside, because it killed servers."""

    prompt: Prompt
    attempts: int
    num_deaths: int

    @property
    def failure(self) -> Failure:
        return Failure(
            reason=Reason.KILLS_SERVER,
            detail=f"the server died {self.num_deaths} times with it, the last time with nothing "
            "else to do",
            is_permanent=True,
        )


class Fleet:
    """Sends prompts to the servers of a run."""

    def __init__(
        self,
        *,
        options: RunOptions,
        members: Sequence[Member],
        layout: Layout,
        provenance: Provenance,
        owner: StoreOwner,
        counters: Counters,
        run_id: str,
        suspects: dict[int, int],
        say: Say,
        resized: Callable[[int], None],
    ) -> None:
        """`members`: one at least has a target. `suspects`: prompts that a dying server had not
        answered -> how often. `say`: tells a person what happens to the servers. `resized`: is
        told whenever the number of prompts that should be kept ready changes."""
        self.members = tuple(members)
        self._options = options
        self._layout = layout
        self._provenance = provenance
        self._owner = owner
        self._counters = counters
        self._run_id = run_id
        self._suspects = suspects
        self._convicted: dict[int, Conviction] = {}
        self._say = say
        self._resized = resized
        self._turns = Turns()
        self._most = connections_each(len(self.members))
        self._lost: list[Exchange] = []
        self._room = 0
        targets = [member.target for member in self.members if member.target is not None]
        self.limits = Limits.strictest([target.limits for target in targets])
        self._reference = targets[0]
        for member in self.members:
            if member.target is not None:
                self._join(member, member.target)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The writers of all servers that are up."""
        return tuple(rank for exchange in self._up for rank in exchange.target.ranks)

    @property
    def num_in_flight(self) -> int:
        return sum(gate.num_in_flight for gate in self._turns.gates)

    @property
    def _up(self) -> list[Exchange]:
        return [member.exchange for member in self.members if member.exchange is not None]

    async def run(self) -> None:
        """Watch the servers and their dumps until cancelled.

        Raises ServerError when the last server is lost, SpaceError.
        """
        async with asyncio.TaskGroup() as tasks:
            for member in self.members:
                tasks.create_task(self._keep(member), name=f"server-{member.url}")

    async def fetch(self, prompt: Prompt, attempt: int) -> Collected | None:
        """Send `prompt` once, to one server; its pieces, or why this attempt gave none. None after
        `send_no_more`, where it was not sent.

        Whoever takes the pieces owns their files.
        """
        ordinal = prompt.ordinal
        served_before = {exchange: exchange.watch.num_served for exchange in self._up}
        while True:
            if ordinal in self._suspects:
                # Its deaths must be durable before it can kill another server.
                await self._owner.drain()
            if (conviction := self._convicted.pop(ordinal, None)) is not None:
                return conviction.failure
            holder = next((exchange for exchange in self._up if exchange.holds(ordinal)), None)
            turn = await self._turns.take(
                prompt.num_tokens,
                only=None if holder is None else holder.watch.gate,
                is_alone=ordinal in self._suspects,
            )
            if turn is None:
                if self._turns.is_closed:
                    return None
                continue  # the server is lost that may have been at work on it
            exchange = next((found for found in self._up if found.watch.gate is turn.gate), None)
            if exchange is None:  # lost in the moment it was granted
                turn.release()
                continue
            if not exchange.watch.is_same_server():
                turn.release()
                await exchange.has_ended.wait()
                continue
            collected = await exchange.fetch(prompt, attempt, turn)
            self._tell_room()
            if not isinstance(collected, Failure):
                self._suspects.pop(ordinal, None)
                return collected
            served = served_before.get(exchange, exchange.watch.num_served)
            return replace(collected, others_served=exchange.watch.num_served > served)

    def send_no_more(self) -> None:
        """What is in flight may end; what waits for its turn is not sent."""
        self._turns.close()

    def forget(self, ordinal: int) -> None:
        """The prompt is given up."""
        self._suspects.pop(ordinal, None)
        for exchange in self._up:
            exchange.forget(ordinal)

    async def close(self) -> list[Conviction]:
        """Leave nothing of ours with the servers or under the dump root, whatever ended the run;
        the prompts that are to be set aside, and of which nobody was told yet."""
        await asyncio.gather(*(exchange.close() for exchange in (*self._up, *self._lost)))
        return list(self._convicted.values())

    # --- servers that come and go ------------------------------------------------------------

    async def _keep(self, member: Member) -> None:
        while True:
            if member.exchange is None:
                self._join(member, await self._proven_again(member))
                self._say(
                    f"the server at {member.url} is proven, and used from now on",
                    event="server_back",
                    server=member.url,
                )
            assert member.exchange is not None
            try:
                await member.exchange.run()
            except ExceptionGroup as group:
                error = first_known(group)
                if not isinstance(error, ServerError):
                    raise
                await self._lose(member, member.exchange, error)

    def _join(self, member: Member, target: Target) -> None:
        member.target = target
        before = member.starts[-1] if member.starts else None
        member.exchange = Exchange(
            options=self._options,
            client=member.client,
            target=target,
            # The dumps that it has handed over are not to be found a second time: they may be
            # waiting for their copy.
            collector=before.collector
            if before is not None and before.target.ready.boot_id == target.ready.boot_id
            else None,
            counters=self._counters,
            run_id=self._run_id,
            layout=self._layout,
            limiter=self._limiter(target),
            turns=self._turns,
            say=self._say,
        )
        member.starts.append(member.exchange)
        self._turns.add(member.exchange.watch.gate)
        self._tell_room()

    def _limiter(self, target: Target) -> Limiter:
        if self._options.concurrency is not None:
            return Fixed(self._options.concurrency)
        most = self._most
        if (taken := target.facts.max_requests) is not None:
            most = min(most, taken)
        return Auto(most=most)

    async def _lose(self, member: Member, exchange: Exchange, error: ServerError) -> None:
        # In this order, and without a pause: whoever waits must find everything decided.
        member.exchange = None
        self._lost.append(exchange)
        has_died = isinstance(error, ServerGone) and not exchange.watch.is_draining
        self._judge(exchange.end(), is_dead=has_died)
        self._turns.remove(exchange.watch.gate)
        self._tell_room()
        await exchange.abandon()
        if not self._up:
            if len(self.members) > 1:
                self._say(f"no server is left of {', '.join(m.url for m in self.members)}")
            raise error
        self._say(
            f"{str(error).partition('. ')[0]}. The run goes on with "
            f"{', '.join(other.url for other in self.members if other.exchange is not None)}, and "
            f"uses {member.url} again when a server is back there.",
            event="server_lost",
            level="warning",
            server=member.url,
        )

    def _judge(self, unanswered: Sequence[Unanswered], *, is_dead: bool) -> None:
        """A server went: what it had not answered is suspect, or convicted."""
        if not is_dead:
            return
        for found in unanswered:
            ordinal = found.prompt.ordinal
            num_deaths = self._suspects.get(ordinal, 0)
            if is_convicted(num_deaths=num_deaths, num_unanswered=len(unanswered)):
                self._convicted[ordinal] = Conviction(
                    prompt=found.prompt, attempts=found.attempts, num_deaths=num_deaths + 1
                )
            else:
                self._owner.post(Lost(ordinal=ordinal, attempts=found.attempts))
            self._suspects[ordinal] = num_deaths + 1

    async def _proven_again(self, member: Member) -> Target:
        """Wait until a server that fits answers at the address."""
        told = ""
        while True:
            try:
                target = await require_target(member.client, self._options)
                for other in (self._reference, *(exchange.target for exchange in self._up)):
                    require_alike(other, target)
                require_no_stricter(self.limits, target)
                require_dump_directory(target.ranks)
                if await member.client.is_draining():  # a probe would only keep it from its end
                    raise ServerUnreachable(f"the server at {member.url} is being stopped")
                self._provenance.check(target)
                canary = await require_probe(
                    member.client,
                    target,
                    run_id=self._run_id,
                    canary_ids=self._provenance.canary_ids,
                )
                await self._provenance.add(target, canary)
                return target
            except ServerUnreachable:
                pass  # which the run has told already
            except ExtractorError as error:
                if str(error) != told:
                    told = str(error)
                    self._say(
                        f"{member.url} is not used: {told}",
                        event="server_unfit",
                        level="warning",
                        server=member.url,
                    )
            for start in member.starts:
                start.tidy()
            await asyncio.sleep(RETURN_PAUSE_S)

    def _tell_room(self) -> None:
        room = sum(exchange.watch.limiter.room for exchange in self._up)
        if room != self._room:
            self._room = room
            self._resized(room)


def require_connections(concurrency: int | None, *, num_servers: int) -> None:
    """Raise UsageError if this process cannot open as many connections as --concurrency needs."""
    if concurrency is None:
        return
    most = connections_each(num_servers, wanted=concurrency)
    if concurrency > most:
        each = "" if num_servers == 1 else f" with each of {num_servers} servers"
        needed = concurrency * num_servers + OTHER_FILES
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise UsageError(
            f"--concurrency {concurrency}{each} needs {needed:,} open files, and the hard limit of "
            f"this process is {limit:,}. Raise it (`ulimit -Hn {needed}` as root, LimitNOFILE of a "
            f"service, --ulimit nofile of a container), or use --concurrency {most} or less."
        )


def connections_each(num_servers: int, *, wanted: int = MOST_LIMIT) -> int:
    """Connections to each server that this process may have open, up to `wanted`.

    Raises the process's limit of open files if needed, up to the hard limit.
    """
    needed = wanted * num_servers + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(1, (soft - OTHER_FILES) // num_servers))

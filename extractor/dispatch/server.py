"""One server of a run, by its address, through all its starts."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

from extractor.core.counters import ServerNow
from extractor.core.errors import UsageError
from extractor.core.humanize import counted
from extractor.dispatch.connection import Connection
from extractor.dispatch.health import HealthState
from extractor.dispatch.limiter import MAX_DEFAULT_LIMIT
from extractor.servers.client import Client
from extractor.servers.target import Target

#: Open files of a run besides the connections for prompts: about 20, two for each mover, four for
#: each tokenizer process, and connections for health checks.
OTHER_FILES = 128


@dataclass(eq=False, kw_only=True)
class Server:
    """The address, what answers there now, and what answered there before."""

    client: Client
    target: Target | None  # as it was proven last; None: it has not answered yet
    connection: Connection | None = None  # None while it is away
    starts: list[Connection] = field(default_factory=list)  # each that prompts were sent to
    num_before: int = 0  # prompts that it answered before all servers went and one came back

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def num_prompts(self) -> int:
        """Prompts that it answered in this session."""
        return self.num_before + sum(start.served.prompts for start in self.starts)

    @property
    def now(self) -> ServerNow:
        lane = None if self.connection is None else self.connection.lane
        return ServerNow(
            url=self.url,
            is_up=lane is not None and lane.health.state is HealthState.SERVING,
            in_flight=0 if lane is None else lane.num_in_flight,
            request_limit=0 if lane is None else lane.health.limiter.limit,
            num_prompts=self.num_prompts,
        )

    def to_text(self) -> str:
        """How many requests it had at a time, for the end of a run."""
        if not self.starts:
            if self.num_before:
                return f"{self.num_before:,} prompts; not used since it went"
            return "it was not used" if self.client.has_answered else "it never answered"
        limiter = self.starts[-1].lane.health.limiter
        text = f"{limiter.max_requests} at a time ({limiter.kind})"
        if limiter.limit < limiter.max_requests:
            text += f", {limiter.limit} after refusals"
        text += f"; {self.num_prompts:,} prompts"
        if len(self.starts) > 1:
            text += f"; it came back, {counted(len(self.starts), 'start')}"
        return text

    def to_document(self) -> dict[str, Any]:
        """What it did in this session, for `extractor run --json`."""
        return {
            "url": self.url,
            "concurrency": self.starts[-1].lane.health.limiter.limit if self.starts else None,
            "concurrency_is": self.starts[-1].lane.health.limiter.kind if self.starts else None,
            "starts": [
                {
                    "boot_id": start.target.ready.boot_id,
                    "prompts": start.served.prompts,
                    "tokens": start.served.tokens,
                }
                for start in self.starts
            ],
        }


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


def connections_each(num_servers: int, *, wanted: int = MAX_DEFAULT_LIMIT) -> int:
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

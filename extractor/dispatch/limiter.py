"""Bounds the requests that one server has at a time. Pure; time is passed in.

The bound is the number that the user gave, or `default_limit`. A refusal (429, 503) halves it, at
most once for all requests that were sent before the last cut, and never below 1:

>>> limiter = Limiter(8)
>>> limiter.refused(now=2.0, sent_at=1.0); limiter.limit
4
>>> limiter.refused(now=2.1, sent_at=1.5); limiter.limit  # sent before that cut
4
>>> limiter.refused(now=3.0, sent_at=2.5); limiter.limit
2

Every `limit` served requests raise it again by an eighth, at least by one, up to the bound:

>>> limiter.served(); limiter.served(); limiter.limit
3
"""

from __future__ import annotations

from typing import Literal

#: Most requests in flight with one server by default: each is a connection.
MAX_DEFAULT_LIMIT = 512


def default_limit(server_takes: int | None, *, connections: int) -> int:
    """Requests in flight with one server where the user names no number.

    `server_takes`: requests that the server runs and queues without refusing one, which is twice
    what it runs at once where its queue has no bound; None where it does not say. `connections`:
    what this process may open. Compared with the fastest fixed number the default had 1.00 of its
    tokens/s on an H200 (benchmarks/results/2026-11-30-1xH200-concurrency). The byte budget bounds
    what the requests cost.

    >>> default_limit(96, connections=1000), default_limit(None, connections=1000)
    (96, 512)
    >>> default_limit(4096, connections=100)
    100
    """
    wanted = MAX_DEFAULT_LIMIT if server_takes is None else server_takes
    return max(1, min(wanted, MAX_DEFAULT_LIMIT, connections))


class Limiter:
    """The bound, as the server's refusals leave it."""

    def __init__(self, max_requests: int, *, kind: Literal["fixed", "auto"] = "fixed") -> None:
        """`kind`: who chose the bound, the user or this program."""
        self.kind = kind
        self.max_requests = max_requests
        self.limit = max_requests  # now
        self._served_at_limit = 0
        self._cut_at = float("-inf")

    def served(self) -> None:
        """A request was answered with what was asked for."""
        self._served_at_limit += 1
        if self._served_at_limit >= self.limit and self.limit < self.max_requests:
            self.limit = min(self.max_requests, self.limit + max(1, self.limit // 8))
            self._served_at_limit = 0

    def refused(self, *, now: float, sent_at: float) -> None:
        """The server has too much to do."""
        if sent_at >= self._cut_at:
            self._cut(max(1, self.limit // 2), now)

    def restart(self, *, now: float) -> None:
        """The server serves again after a time in which it served nothing: begin with 1."""
        self._cut(1, now)

    def _cut(self, limit: int, now: float) -> None:
        self.limit, self._cut_at, self._served_at_limit = limit, now, 0

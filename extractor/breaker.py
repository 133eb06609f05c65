"""How hard to push, and when to stop: a circuit breaker with a throttle. Pure; time is passed in.

**Throttle.** A refusal (429, 503) halves the number of requests in flight, at most once for all
that were sent before the last cut; every `limit` served requests give one back.

>>> breaker = Breaker(max_requests=8)
>>> breaker.refused(now=2.0, sent_at=1.0); breaker.limit
4
>>> breaker.refused(now=2.1, sent_at=1.5); breaker.limit  # sent before that cut: no news
4
>>> breaker.refused(now=3.0, sent_at=2.5); breaker.limit
2
>>> for second in (4, 5, 6):
...     breaker.served(now=second)
>>> breaker.limit
3

**Circuit.** `trip_after` requests in a row without service (broken connections, time-outs, 5xx)
open it: nothing is sent any more but a known good probe. If that is served, what failed was the
prompts' own fault, and the circuit closes; if not, it is the server's, and costs no prompt an
attempt.

>>> breaker = Breaker(max_requests=8)
>>> for second in range(8):
...     breaker.unserved(now=second)
>>> breaker.is_open
True
>>> breaker.served(now=9.0); breaker.is_open, breaker.limit
(False, 1)

So do refusals of everything for `refused_open_s`: from then on the probe alone asks for room.

>>> breaker = Breaker(max_requests=8)
>>> breaker.refused(now=100.0, sent_at=99.0); breaker.refused(now=109.0, sent_at=108.0)
>>> breaker.is_open
False
>>> breaker.refused(now=111.0, sent_at=110.0); breaker.is_open
True

**Patience.** A server that serves nothing is given up: after `gone_after_s` where nothing answers,
after `useless_after_s` where it answers, but not with what was asked for.

>>> breaker = Breaker(max_requests=8)
>>> breaker.refused(now=100.0, sent_at=99.0)
>>> breaker.is_hopeless(now=699.0), breaker.is_hopeless(now=701.0)
(False, True)
>>> breaker.unserved(now=702.0, is_gone=True); breaker.served(now=703.0)
>>> breaker.unserved(now=710.0, is_gone=True)
>>> breaker.is_hopeless(now=739.0), breaker.is_hopeless(now=741.0)
(False, True)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Breaker:
    """What the last requests say of the server. One for a session."""

    max_requests: int  # in flight, when all is well
    trip_after: int = 8
    refused_open_s: float = 10.0
    gone_after_s: float = 30.0
    useless_after_s: float = 600.0
    limit: int = field(init=False)  # requests in flight now
    is_open: bool = field(init=False, default=False)
    _served_at_limit: int = field(init=False, default=0)
    _unserved_in_row: int = field(init=False, default=0)
    _cut_at: float = field(init=False, default=float("-inf"))
    _trouble_since: float | None = field(init=False, default=None)
    _is_gone: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.limit = self.max_requests

    def served(self, *, now: float) -> None:
        """A request was answered with what was asked for."""
        if self.is_open:
            self.is_open = False
            self._cut(1, now)
            self._served_at_limit = -1  # the probe is no prompt
        self._unserved_in_row = 0
        self._trouble_since = None
        self._is_gone = False
        self._served_at_limit += 1
        if self._served_at_limit >= self.limit and self.limit < self.max_requests:
            self.limit += 1
            self._served_at_limit = 0

    def refused(self, *, now: float, sent_at: float) -> None:
        """The server said that it has too much to do."""
        self._note_trouble(now, is_gone=False)
        if sent_at >= self._cut_at:
            self._cut(max(1, self.limit // 2), now)
        if self.trouble_s(now=now) > self.refused_open_s:
            self.is_open = True

    def unserved(self, *, now: float, is_gone: bool = False) -> None:
        """A request was not served. `is_gone`: there was not even an answer."""
        self._note_trouble(now, is_gone=is_gone)
        self._unserved_in_row += 1
        if self._unserved_in_row >= self.trip_after:
            self.is_open = True

    @property
    def is_gone(self) -> bool:
        """Whether the last request had no answer at all."""
        return self._is_gone

    def is_hopeless(self, *, now: float) -> bool:
        """Whether the server has served nothing for so long that the run should end."""
        if self._trouble_since is None:
            return False
        patience_s = self.gone_after_s if self._is_gone else self.useless_after_s
        return now - self._trouble_since > patience_s

    def trouble_s(self, *, now: float) -> float:
        """Seconds since the first failure behind which no request was served."""
        return 0.0 if self._trouble_since is None else now - self._trouble_since

    def _note_trouble(self, now: float, *, is_gone: bool) -> None:
        if self._trouble_since is None:
            self._trouble_since = now
        self._is_gone = is_gone

    def _cut(self, limit: int, now: float) -> None:
        self.limit, self._cut_at, self._served_at_limit = limit, now, 0

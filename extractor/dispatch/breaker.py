"""When to stop: a circuit breaker. Pure; time is passed in.

**Circuit.** `trip_after` requests in a row without service (broken connections, time-outs, 5xx)
open it: nothing is sent any more but a known good probe. If that is served, what failed was the
prompts' own fault, and the circuit closes; if not, it is the server's, and costs no prompt an
attempt.

>>> breaker = Breaker()
>>> for second in range(8):
...     breaker.unserved(now=second)
>>> breaker.is_open
True
>>> breaker.served(); breaker.is_open
False

So do refusals of everything for `refused_open_s`: from then on the probe alone asks for room.

>>> breaker = Breaker()
>>> breaker.refused(now=100.0); breaker.refused(now=109.0); breaker.is_open
False
>>> breaker.refused(now=111.0); breaker.is_open
True

**Patience.** A server that serves nothing is given up: after `gone_after_s` where nothing answers,
after `useless_after_s` where it answers, but not with what was asked for.

>>> breaker = Breaker()
>>> breaker.refused(now=100.0)
>>> breaker.is_hopeless(now=699.0), breaker.is_hopeless(now=701.0)
(False, True)
>>> breaker.unserved(now=702.0, is_gone=True); breaker.served()
>>> breaker.unserved(now=710.0, is_gone=True)
>>> breaker.is_hopeless(now=739.0), breaker.is_hopeless(now=741.0)
(False, True)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Breaker:
    """What the last requests say of a server. One for each start of each server."""

    trip_after: int = 8
    refused_open_s: float = 10.0
    gone_after_s: float = 30.0
    useless_after_s: float = 600.0
    is_open: bool = field(init=False, default=False)
    _unserved_in_row: int = field(init=False, default=0)
    _trouble_since: float | None = field(init=False, default=None)
    _is_gone: bool = field(init=False, default=False)

    def served(self) -> None:
        """A request was answered with what was asked for."""
        self.is_open = False
        self._unserved_in_row = 0
        self._trouble_since = None
        self._is_gone = False

    def refused(self, *, now: float) -> None:
        """The server said that it has too much to do."""
        self._note_trouble(now, is_gone=False)
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

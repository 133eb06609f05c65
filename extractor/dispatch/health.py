"""The health of one server, learned from its replies: one state. Pure; time is passed in.

```
            8 requests in a row not served, or
            10 s of nothing but refusals
  SERVING ------------------------------------> PAUSED
     ^  <------------------------------------   (only probes are sent)
     |        a request or a probe is served
     |
     +---> STOPPING   the server says that it is shutting down; back if it says otherwise
```

While a server is paused, failures cost no prompt an attempt: a probe, which every server can serve,
shows whether the prompts or the server are at fault.

>>> from manifest.states import Reason
>>> server_error = Failure(reason=Reason.SERVER_ERROR, detail="500", kind=FailureKind.SERVER)
>>> health = Health(Limiter(64))
>>> for second in range(8):
...     health.note(server_error, now=second, sent_at=second)
>>> health.state.name, health.limit
('PAUSED', 0)
>>> health.note(None, now=9, sent_at=9, is_probe=True)
>>> health.state.name, health.limit
('SERVING', 1)

A server that serves nothing is given up: after `gone_after_s` if it does not even answer, after
`useless_after_s` if it answers.

>>> health.note(server_error, now=100, sent_at=100)
>>> health.ending(now=699), health.ending(now=701).name
(None, 'USELESS')
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from extractor.core.failure import Failure, FailureKind
from extractor.core.timings import HealthTimings
from extractor.dispatch.limiter import Limiter

#: Requests in a row that were not served (broken connections, time-outs, 5xx) pause a server.
PAUSE_AFTER = 8


class HealthState(Enum):
    """Whether a server gets prompts."""

    SERVING = "serving"
    PAUSED = "paused"  # serves nothing: only probes are sent
    STOPPING = "stopping"  # is shutting down, and said so


class Ending(Enum):
    """Why a server must be given up."""

    GONE = "gone"  # it does not answer
    USELESS = "useless"  # it answers, but serves nothing
    NOT_STOPPED = "not_stopped"  # it is shutting down and does not end
    NO_SPACE = "no_space"  # the dump root stays full


@dataclass(kw_only=True)
class Trouble:
    """Failures since the last request that was served."""

    since: float
    num_unserved: int = 0
    is_gone: bool = False  # the last request had no answer at all


@dataclass(frozen=True, kw_only=True)
class FullDirectory:
    """A dump root that somebody else filled."""

    directory: Path
    need_bytes: int  # of the last dump that found no room
    since: float


class Health:
    """What one start of one server may get."""

    def __init__(self, limiter: Limiter, patience: HealthTimings | None = None) -> None:
        self.limiter = limiter
        self.num_served = 0  # requests answered with what was asked for, probes included
        self.last_trouble = ""
        self._patience = patience or HealthTimings()
        self._trouble: Trouble | None = None
        self._is_paused = False
        self._stopping_since: float | None = None
        self.full: FullDirectory | None = None

    @property
    def state(self) -> HealthState:
        if self._stopping_since is not None:
            return HealthState.STOPPING
        return HealthState.PAUSED if self._is_paused else HealthState.SERVING

    @property
    def limit(self) -> int:
        """Requests that the server may have at a time now; 0 while it gets none."""
        return self.limiter.limit if self.state is HealthState.SERVING else 0

    @property
    def is_silent(self) -> bool:
        """Whether the last request had no answer at all."""
        return self._trouble is not None and self._trouble.is_gone

    def note(
        self, failure: Failure | None, *, now: float, sent_at: float, is_probe: bool = False
    ) -> None:
        """Learn from how a request ended; `failure`: None if it was served."""
        kind = None if failure is None else failure.kind
        if failure is not None:
            self.last_trouble = failure.detail
        if kind is not None and (kind.is_refusal or kind is FailureKind.SILENT):
            self.limiter.refused(now=now, sent_at=sent_at)
        if kind is not None and (kind.is_refusal or kind.blames_server):
            self._note_trouble(kind, now)
            return
        was_paused, self._is_paused, self._trouble = self._is_paused, False, None
        self.num_served += failure is None
        if was_paused:
            self.limiter.restart(now=now)
        elif failure is None and not is_probe:
            self.limiter.served()

    def _note_trouble(self, kind: FailureKind, now: float) -> None:
        trouble = self._trouble = self._trouble or Trouble(since=now)
        trouble.is_gone = kind.is_lost
        trouble.num_unserved += kind.blames_server
        if trouble.num_unserved >= PAUSE_AFTER:
            self._is_paused = True
        elif kind.is_refusal and now - trouble.since > self._patience.refused_open_s:
            self._is_paused = True

    def note_stopping(self, is_stopping: bool, *, now: float) -> None:
        """The server says whether it is shutting down."""
        self._stopping_since = now if is_stopping else None

    def note_full(self, directory: Path, need_bytes: int, *, now: float) -> None:
        """A dump that takes `need_bytes` found no room in `directory`."""
        since = now if self.full is None else self.full.since
        self.full = FullDirectory(directory=directory, need_bytes=need_bytes, since=since)

    def trouble_s(self, *, now: float) -> float:
        """Seconds since the first failure after which no request was served."""
        return 0.0 if self._trouble is None else now - self._trouble.since

    def needs_trial(self, *, now: float) -> bool:
        """Whether a probe must show if the server is at fault, or still there."""
        is_late = self.trouble_s(now=now) > self._patience.trial_after_s
        return self._is_paused or self.is_silent or is_late

    def ending(self, *, now: float) -> Ending | None:
        """Why the server must be given up; None if it need not be."""
        if self._trouble is not None:
            patience = self._patience
            patience_s = patience.gone_after_s if self.is_silent else patience.useless_after_s
            if self.trouble_s(now=now) > patience_s:
                return Ending.GONE if self.is_silent else Ending.USELESS
        if self.stopping_s(now=now) > self._patience.useless_after_s:
            return Ending.NOT_STOPPED
        full_s = 0.0 if self.full is None else now - self.full.since
        return Ending.NO_SPACE if full_s > self._patience.space_patience_s else None

    def stopping_s(self, *, now: float) -> float:
        """Seconds since the server said that it is shutting down."""
        return 0.0 if self._stopping_since is None else now - self._stopping_since

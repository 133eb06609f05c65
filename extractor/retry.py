"""What to do after an attempt failed. Pure; time and chance are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from manifest.states import Reason


class Remedy(Enum):
    """What an attempt's outcome asks for."""

    RETRY = "retry"  # this prompt again, under a new rid
    GIVE_UP = "give_up"  # the prompt fails with its reason


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt that gave no sample."""

    reason: Reason
    detail: str
    is_permanent: bool = False  # trying again cannot help
    is_busy: bool = False  # 429 or 503: nothing is wrong with the prompt
    is_transport: bool = False  # the connection failed: the server may be gone

    @property
    def is_not_counted(self) -> bool:
        """Whether it says nothing against the prompt, so that it costs none of its attempts."""
        return self.is_busy or self.is_transport


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with full jitter.

    The delay after setback n is uniform in [0, min(cap, base * 2**(n-1))]:

    >>> policy = RetryPolicy(max_attempts=4, base_delay_s=0.5, max_delay_s=30.0)
    >>> [policy.delay_s(setback, chance=1.0) for setback in (1, 2, 3, 8)]
    [0.5, 1.0, 2.0, 30.0]
    >>> policy.remedy(Failure(reason=Reason.DUMP_MISSING, detail=""), num_counted=4).name
    'GIVE_UP'
    """

    max_attempts: int
    base_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def remedy(self, failure: Failure, *, num_counted: int) -> Remedy:
        """What to do after `failure`; `num_counted` attempts failed by now that count."""
        if failure.is_permanent:
            return Remedy.GIVE_UP
        if failure.is_not_counted or num_counted < self.max_attempts:
            return Remedy.RETRY
        return Remedy.GIVE_UP

    def delay_s(self, setback: int, *, chance: float) -> float:
        """Seconds to wait after setback number `setback`; `chance` is uniform in [0, 1]."""
        ceiling = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(setback - 1, 30))
        return ceiling * chance

"""What to do after an attempt failed. Pure; time and chance are passed in."""

from __future__ import annotations

from dataclasses import dataclass

from extractor.core.failure import Failure, FailureKind


@dataclass(kw_only=True)
class Setbacks:
    """The failed attempts of one prompt in this session."""

    total: int = 0
    counted: int = 0  # those that cost one of the prompt's attempts
    telling: int = 0  # those, and every failure while the same server served others

    def add(self, failure: Failure, *, others_served: bool) -> None:
        """One more; `others_served`: whether the same server served other prompts meanwhile. If it
        did not, a refusal says nothing about this prompt."""
        self.total += 1
        self.counted += failure.kind.counts
        tells = others_served and failure.kind is not FailureKind.FULL
        self.telling += failure.kind.counts or tells


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with full jitter, and hard caps on attempts.

    The delay after setback n is uniform in [0, min(cap, base * 2**(n-1))]:

    >>> policy = RetryPolicy(max_attempts=4, base_delay_s=0.5, max_delay_s=30.0)
    >>> [policy.delay_s(setback, chance=1.0) for setback in (1, 2, 3, 8)]
    [0.5, 1.0, 2.0, 30.0]

    A prompt is given up at once for what cannot change, after `max_attempts` failures that count,
    and after `max_setbacks` of any kind while its server served other prompts, which takes about a
    quarter of an hour:

    >>> from manifest.states import Reason
    >>> missing = Failure(reason=Reason.DUMP_MISSING, detail="")
    >>> [policy.gives_up(missing, Setbacks(total=n, counted=n, telling=n)) for n in (3, 4)]
    [False, True]
    >>> busy = Failure(reason=Reason.SERVER_ERROR, detail="HTTP 503", kind=FailureKind.BUSY)
    >>> [policy.gives_up(busy, Setbacks(total=n, telling=n)) for n in (63, 64)]
    [False, True]
    """

    max_attempts: int
    base_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_setbacks: int = 64

    def gives_up(self, failure: Failure, setbacks: Setbacks) -> bool:
        """Whether the prompt fails for `failure`, the last of `setbacks`."""
        if failure.kind is FailureKind.PERMANENT or setbacks.telling >= self.max_setbacks:
            return True
        return failure.kind.counts and setbacks.counted >= self.max_attempts

    def delay_s(self, setback: int, *, chance: float) -> float:
        """Seconds to wait after setback number `setback`; `chance` is uniform in [0, 1]."""
        ceiling = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(setback - 1, 30))
        return ceiling * chance

"""What to do after an attempt failed. Pure; time and chance are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from extractor.core.failure import Failure


class Remedy(Enum):
    """What an attempt's outcome asks for."""

    RETRY = "retry"  # this prompt again, under a new rid
    GIVE_UP = "give_up"  # the prompt fails with its reason


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with full jitter, up to bounds that keep for ever from being for ever.

    The delay after setback n is uniform in [0, min(cap, base * 2**(n-1))]:

    >>> from manifest.states import Reason
    >>> policy = RetryPolicy(max_attempts=4, base_delay_s=0.5, max_delay_s=30.0)
    >>> [policy.delay_s(setback, chance=1.0) for setback in (1, 2, 3, 8)]
    [0.5, 1.0, 2.0, 30.0]

    A prompt is given up for what cannot change, and after `max_attempts` failures of its own:

    >>> missing = Failure(reason=Reason.DUMP_MISSING, detail="")
    >>> [policy.remedy(missing, num_counted=n, num_setbacks=n).name for n in (3, 4)]
    ['RETRY', 'GIVE_UP']

    A refusal or a broken connection says nothing against the prompt and costs none of these. But
    one whose requests fail so again and again while others are served (else the run had ended) is
    given up as well, about a quarter of an hour later:

    >>> busy = Failure(reason=Reason.SERVER_ERROR, detail="HTTP 503", is_busy=True)
    >>> [policy.remedy(busy, num_counted=0, num_setbacks=n).name for n in (63, 64)]
    ['RETRY', 'GIVE_UP']
    """

    max_attempts: int
    base_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_setbacks: int = 64

    def remedy(self, failure: Failure, *, num_counted: int, num_setbacks: int) -> Remedy:
        """What to do after `failure`; `num_counted` of `num_setbacks` failures so far count."""
        if failure.is_permanent or num_setbacks >= self.max_setbacks:
            return Remedy.GIVE_UP
        if failure.is_not_counted or num_counted < self.max_attempts:
            return Remedy.RETRY
        return Remedy.GIVE_UP

    def delay_s(self, setback: int, *, chance: float) -> float:
        """Seconds to wait after setback number `setback`; `chance` is uniform in [0, 1]."""
        ceiling = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(setback - 1, 30))
        return ceiling * chance


def is_convicted(*, num_deaths: int, num_unanswered: int) -> bool:
    """Whether a prompt that a dying server had not answered is what killed it.

    `num_deaths`: how often that happened to the prompt before; `num_unanswered`: prompts that the
    server had not answered this time. The first time all of them are suspects, and each is sent
    alone from then on; so the second time there is but one.

    >>> is_convicted(num_deaths=0, num_unanswered=64), is_convicted(num_deaths=0, num_unanswered=1)
    (False, False)
    >>> is_convicted(num_deaths=1, num_unanswered=1)
    True
    """
    return num_deaths >= 1 and num_unanswered == 1

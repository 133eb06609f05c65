"""Which prompts may have killed a server. Pure.

When a server dies, every prompt that it had not answered is a suspect: from then on it is sent
alone, with nothing else in flight on its server. If that server dies as well, the prompt is
convicted. So a poison prompt can crash at most two servers.

>>> suspects = Suspects({})
>>> crashed = [InFlightPrompt(prompt=None, attempts=1, ordinal=row) for row in (7, 8)]
>>> suspects.judge(crashed), suspects.is_suspect(7)
(None, True)
>>> suspects.judge(crashed[:1]).ordinal  # alone, when another server died
7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extractor.core.failure import Failure, FailureKind
from manifest.states import Reason
from prompts.types import Prompt


@dataclass(frozen=True, kw_only=True)
class InFlightPrompt:
    """A prompt that a server has, or may have had, and has not answered."""

    prompt: Prompt
    ordinal: int
    attempts: int  # so far, over all sessions


class Suspects:
    """The suspects of all servers of a run."""

    def __init__(self, num_deaths: dict[int, int]) -> None:
        """`num_deaths`: row -> servers that died with it, as earlier sessions recorded it."""
        self._num_deaths = num_deaths
        self._convicted: set[int] = set()

    def is_suspect(self, ordinal: int) -> bool:
        """Whether the prompt must be sent alone."""
        return ordinal in self._num_deaths

    def is_convicted(self, ordinal: int) -> bool:
        """Whether the prompt killed two servers and must not be sent again."""
        return ordinal in self._convicted

    def judge(self, unanswered: Sequence[InFlightPrompt]) -> InFlightPrompt | None:
        """A server died, with these prompts unanswered: the convicted one, if any."""
        for found in unanswered:
            self._num_deaths[found.ordinal] = self._num_deaths.get(found.ordinal, 0) + 1
        if len(unanswered) == 1 and self._num_deaths[unanswered[0].ordinal] > 1:
            self._convicted.add(unanswered[0].ordinal)
            return unanswered[0]
        return None

    def clear(self, ordinal: int) -> None:
        """The prompt was served, or given up."""
        self._num_deaths.pop(ordinal, None)

    def sentence(self, ordinal: int) -> Failure:
        """The failure of a convicted prompt."""
        return Failure(
            reason=Reason.KILLS_SERVER,
            detail=f"the server died {self._num_deaths[ordinal]} times with it, the last time with "
            "nothing else to do",
            kind=FailureKind.PERMANENT,
        )

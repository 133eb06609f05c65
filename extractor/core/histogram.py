"""Counts durations in a histogram of fixed size. Pure."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

# Renard's series R20: each is 12 % more than the one before, and 1, 2 and 5 are among them.
_R20 = (
    1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8,
    3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0,
)  # fmt: skip


_DECADES: Final = range(-5, 3)  # 10 us to 1,000 s


#: Upper bounds of the buckets, in seconds; what is longer goes into one more.
BOUNDS_S: Final = (
    *(float(f"{step}e{decade}") for decade in _DECADES for step in _R20),
    1000.0,
)


#: The bounds that metrics export: 1, 2 and 5 of each decade.
SHOWN_BOUNDS_S: Final = tuple(
    bound for bound in BOUNDS_S if f"{bound:e}".startswith(("1.000", "2.000", "5.000"))
)


class Durations:
    """A histogram of durations in seconds. Threads may share it.

    >>> durations = Durations()
    >>> for milliseconds in range(1, 101):
    ...     durations.add(milliseconds / 1000)
    >>> durations.count, durations.quantile(0.5), durations.quantile(0.99), durations.max_s
    (100, 0.05, 0.1, 0.1)
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        # `counts[i] += 1` is not one step for the interpreter: movers would lose each other's.
        self._lock = threading.Lock()
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one; a negative one, of a clock that was set back, as 0."""
        seconds = max(0.0, seconds)
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self.total_s += seconds
            self.max_s = max(self.max_s, seconds)

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean_s(self) -> float:
        """0.0 where nothing was counted."""
        return self.total_s / max(1, self.count)

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the durations do not exceed: the true value or up to 12 % more
        (or up to 10 us). 0.0 where nothing was counted."""
        for bound, so_far in zip((*BOUNDS_S, self.max_s), accumulate(self._counts), strict=True):
            if so_far and so_far >= share * self.count:
                return min(bound, self.max_s)
        return 0.0

    def buckets(self) -> Iterator[tuple[float, int]]:
        """For each of `SHOWN_BOUNDS_S`, and for infinity: how many do not exceed it."""
        with self._lock:
            counts = list(self._counts)
        so_far = dict(zip((*BOUNDS_S, float("inf")), accumulate(counts), strict=True))
        for bound in (*SHOWN_BOUNDS_S, float("inf")):
            yield bound, so_far[bound]

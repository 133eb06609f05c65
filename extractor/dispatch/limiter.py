"""How many requests one server gets at a time. Pure; time and outcomes are passed in.

Two ways, one interface. `Fixed` is a number that a person chose. `Auto` finds the least number that
gives the most tokens/s: it climbs a ladder of limits (each about 1.4 times the one below) and, to
judge a rung, measures it in turn with the one it stands on, so that whatever changes with time
(other users of the machine, longer prompts) touches both alike. What it learnt of each step is kept
and averaged, so that noise does not carry it away:

- up, where the step gains more than noise explains; two rungs at a time until that failed twice;
- down, where the step below loses next to nothing;
- else it stays, and looks again ever more rarely.

Windows in which the limit was not reached (the byte budget, the disk or the end of the input was in
the way) tell nothing and move nothing. Both halve the limit for a refusal (429, 503), at most once
for all that was sent before the last cut, and never go below 1:

>>> fixed = Fixed(8)
>>> fixed.refused(now=2.0, sent_at=1.0); fixed.limit
4
>>> fixed.refused(now=2.1, sent_at=1.5); fixed.limit  # sent before that cut: no news
4
>>> fixed.refused(now=3.0, sent_at=2.5); fixed.limit
2

Every `limit` served requests give `Fixed` one back:

>>> for second in (4, 5):
...     fixed.served(now=second, num_tokens=100, in_flight=2)
>>> fixed.limit
3

`Auto` begins at 16. A server whose speed grows with the requests in flight until there are 48 of
them, and not beyond, lets it climb to about there:

>>> auto = Auto(most=256)
>>> auto.limit
16
>>> now = 0.0
>>> for _ in range(20000):
...     now += 1 / min(auto.limit, 48)
...     auto.served(now=now, num_tokens=100, in_flight=auto.limit)
>>> auto.limit
48
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

#: Requests in flight that `Auto` begins with.
FIRST_LIMIT = 16
#: `Auto` never has more with one server, whatever that takes: each is a connection.
MOST_LIMIT = 512
#: A window lasts for so many replies, or so many times the limit, and so many seconds.
LEAST_REPLIES = 12
REPLIES_PER_LIMIT = 3
LEAST_WINDOW_S = 0.1
#: ln of the tokens/s that a step up must gain to be worth it: 1 %.
WORTH = 0.01
#: A first look that shows so much is believed.
CLEAR = 0.12
#: What is assumed of the noise of one comparison until it was seen.
ASSUMED_SPREAD = 0.05
#: Comparisons of one trial, and how many of all times count for a step.
PAIRS = 2
MEMORY = 12
#: Rungs of a step while it climbs, and trials that must fail before it stops climbing.
STRIDE = 2
CLIMBS = 2
#: What a refusal says of the step to that limit.
REFUSED_GAIN = -0.3
#: Windows between two trials: doubled for each that changed nothing.
LEAST_PATIENCE = 2
MOST_PATIENCE = 32


class Limiter(Protocol):
    """What decides how many requests a server has at a time."""

    @property
    def kind(self) -> str:
        """`fixed` or `auto`."""

    @property
    def limit(self) -> int:
        """Requests that may be in flight now; 1 at least."""

    @property
    def room(self) -> int:
        """Requests that may soon be in flight: as many prompts are kept ready."""

    def served(self, *, now: float, num_tokens: int, in_flight: int) -> None:
        """A prompt was answered with what was asked for; `in_flight` counts it."""

    def refused(self, *, now: float, sent_at: float) -> None:
        """The server said that it has too much to do."""

    def restart(self, *, now: float) -> None:
        """The server serves again after a time in which it served nothing: begin with 1."""


class Fixed:
    """A number that a person chose; below it only for refusals."""

    kind = "fixed"

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = most
        self._served_at_limit = 0
        self._cut_at = float("-inf")

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def room(self) -> int:
        return self._most

    def served(self, *, now: float, num_tokens: int, in_flight: int) -> None:
        self._served_at_limit += 1
        if self._served_at_limit >= self._limit and self._limit < self._most:
            self._limit += 1
            self._served_at_limit = 0

    def refused(self, *, now: float, sent_at: float) -> None:
        if sent_at >= self._cut_at:
            self._cut(max(1, self._limit // 2), now)

    def restart(self, *, now: float) -> None:
        self._cut(1, now)

    def _cut(self, limit: int, now: float) -> None:
        self._limit, self._cut_at, self._served_at_limit = limit, now, 0


@dataclass(kw_only=True)
class _Step:
    """What is known of the step from one rung to another above it."""

    num: int = 0
    gain: float = 0.0  # mean of ln(tokens/s above / tokens/s below)
    spread: float = ASSUMED_SPREAD  # mean distance of one comparison from that mean

    def learn(self, gain: float) -> None:
        if self.num:
            self.spread += (abs(gain - self.gain) - self.spread) / min(self.num + 1, MEMORY)
        self.num += 1
        self.gain += (gain - self.gain) / min(self.num, MEMORY)

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is more than noise explains."""
        return self.gain - self.spread / math.sqrt(min(self.num, MEMORY)) > WORTH

    @property
    def is_worthless(self) -> bool:
        return self.gain < WORTH


@dataclass(kw_only=True)
class _Window:
    """Replies at one limit.

    Replies come in bursts, a batch at a time. A window begins and ends with the first reply of a
    burst, which it counts at its beginning only: else a burst more or less would look like a gain.
    """

    limit: int
    settling: int  # replies to pass over first: they were sent under another limit
    goal: int  # replies to count
    began: float | None = None
    num_replies: int = 0  # since it began, or of those passed over
    num_full: int = 0  # replies that came while the limit was reached
    num_tokens: int = 0
    _first: float | None = None
    _last: float = 0.0

    def add(self, now: float, num_tokens: int, *, is_full: bool) -> bool:
        """Take in a reply; True where it ends the window, and is no part of it."""
        if self._first is None:
            self._first = self._last = now
        # Since the burst before: longer than the mean time between two replies.
        is_burst = (now - self._last) * self.num_replies >= self._last - self._first
        self._last = now
        if self.began is None:
            if self.num_replies < self.settling or not is_burst:
                self.num_replies += 1
                return False
            self.began = self._first = now
            self.num_replies = 0
        elif self.num_replies >= self.goal and is_burst and now - self.began >= LEAST_WINDOW_S:
            return True
        self.num_replies += 1
        self.num_full += is_full
        self.num_tokens += num_tokens
        return False

    def rate(self, now: float) -> float | None:
        """Tokens/s; None where the limit was not what bounded it."""
        assert self.began is not None
        # Of a whole batch that is answered at once, only the first reply finds the limit reached.
        if 2 * self.limit * self.num_full < self.num_replies:
            return None
        return self.num_tokens / (now - self.began)


class Auto:
    """The least limit that gives the most tokens/s, found by trying."""

    kind = "auto"

    def __init__(self, *, most: int) -> None:
        """`most`: what the server takes."""
        self._rungs = _ladder(max(1, min(most, MOST_LIMIT)))
        self._steps: dict[tuple[int, int], _Step] = {}  # by rungs
        self._cut_at = float("-inf")
        self._begin(_last(self._rungs, lambda limit: limit <= FIRST_LIMIT))

    def _begin(self, base: int) -> None:
        self._base = base  # the rung it stands on
        self._candidate: int | None = None  # the rung that is on trial
        self._base_rate: float | None = None
        self._climbs_left = CLIMBS  # trials that may fail until it stops climbing
        self._goes_up = True  # the next trial
        self._num_pairs = 0
        self._pause = 0  # windows until the next trial
        self._patience = LEAST_PATIENCE
        self._measure()

    @property
    def limit(self) -> int:
        return self._rungs[self._base if self._candidate is None else self._candidate]

    @property
    def room(self) -> int:
        return self.limit

    def served(self, *, now: float, num_tokens: int, in_flight: int) -> None:
        if self._window.add(now, num_tokens, is_full=in_flight >= self.limit):
            self._judge(self._window.rate(now))

    def refused(self, *, now: float, sent_at: float) -> None:
        if sent_at < self._cut_at:
            return
        self._cut_at = now
        if self._candidate is not None and self._candidate > self._base:
            self._step(self._base, self._candidate).learn(REFUSED_GAIN)
            self._stay(pause=self._patience)
            return
        if self._base > 0:
            self._step(self._base - 1, self._base).learn(REFUSED_GAIN)
        half = self._rungs[self._base] // 2
        self._base = _last(self._rungs, lambda limit: limit <= half)
        self._patience = LEAST_PATIENCE
        self._stay(pause=self._patience)

    def restart(self, *, now: float) -> None:
        self._cut_at = now
        self._steps.clear()
        self._begin(0)

    def _step(self, one: int, other: int) -> _Step:
        return self._steps.setdefault((min(one, other), max(one, other)), _Step())

    def _judge(self, rate: float | None) -> None:
        """What to do after a window."""
        if rate is None:
            if self._candidate is None:
                self._measure()
            else:
                self._stay(pause=self._patience)
        elif self._candidate is None:
            self._base_rate = rate
            self._pause -= 1
            if self._pause < 0:
                self._try_neighbour()
            self._measure()
        else:
            self._compare(self._candidate, rate)

    def _try_neighbour(self) -> None:
        top = len(self._rungs) - 1
        up = min(self._base + (STRIDE if self._climbs_left else 1), max(top, self._base + 1))
        down = self._base - 1
        wanted = up if self._goes_up else down
        if not 0 <= wanted <= top:
            self._goes_up = not self._goes_up
            wanted = up if self._goes_up else down
        if 0 <= wanted <= top:
            self._candidate = wanted

    def _compare(self, candidate: int, rate: float) -> None:
        assert self._base_rate is not None
        is_up = candidate > self._base
        step = self._step(self._base, candidate)
        gain = math.log(max(rate, 1e-9) / max(self._base_rate, 1e-9)) * (1 if is_up else -1)
        is_clear = abs(gain) >= CLEAR * abs(candidate - self._base) and gain * step.gain >= 0
        step.learn(gain)
        self._num_pairs += 1
        if self._num_pairs < PAIRS and not is_clear:
            self._candidate = None  # once more, in turn with the rung it stands on
            self._pause = 0
            self._measure()
        elif is_up and self._is_enough(step, is_clear=is_clear and gain > 0):
            self._move(candidate, rate)
        elif not is_up and step.is_worthless:
            self._move(candidate, rate)
        elif is_up and self._climbs_left > 1:
            self._climbs_left -= 1
            self._stay(pause=0)
        else:
            self._climbs_left = 0
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._goes_up = not self._goes_up
            self._stay(pause=self._patience)

    def _is_enough(self, step: _Step, *, is_clear: bool) -> bool:
        """Whether to go up. While it climbs, doubt is no reason to stay: too many requests cost
        little, and are found out later; too few cost the whole run."""
        if self._climbs_left:
            return is_clear or not step.is_worthless
        return is_clear or step.is_worth_it

    def _move(self, rung: int, rate: float) -> None:
        is_up = rung > self._base
        self._base, self._base_rate = rung, rate
        self._candidate = None
        self._num_pairs = 0
        self._patience = LEAST_PATIENCE
        self._pause = 0
        self._goes_up = is_up
        if is_up and self._climbs_left:
            self._try_neighbour()  # the rate of this rung was just measured
        self._measure()

    def _stay(self, *, pause: int) -> None:
        """Back to the rung it stands on, for so many windows at least."""
        self._candidate = None
        self._num_pairs = 0
        self._pause = pause
        self._measure()

    def _measure(self) -> None:
        limit = self.limit
        self._window = _Window(
            limit=limit,
            settling=max(limit, self._rungs[self._base]),
            goal=max(LEAST_REPLIES, REPLIES_PER_LIMIT * limit),
        )


def _ladder(most: int) -> list[int]:
    """Limits to choose from.

    >>> _ladder(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    rungs = [1]
    power = 2
    while rungs[-1] < most:
        rungs += [power, power + power // 2]
        power *= 2
    return [rung for rung in rungs if rung < most] + [most]


def _last(rungs: list[int], fits: Callable[[int], bool]) -> int:
    """The number of the last rung that fits; 0 where none does."""
    return max((number for number, rung in enumerate(rungs) if fits(rung)), default=0)

"""Predicts the size of a run from its rows. Pure; memory does not grow with their number."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from extractor.core.admission import Admission, Refusal, Room
from extractor.core.humanize import amount, duration, table
from extractor.core.request import Limits, dump_bytes
from extractor.shards.format import MAX_ROOM_BYTES, header_room, sample_bytes, samples_that_fit
from prompts.types import BadRow, Prompt

QUANTILES = (0.5, 0.9, 0.99)
#: Prompts kept for measuring the server's speed: a fair sample of all.
SAMPLED = 256


@dataclass(kw_only=True)
class RowCounts:
    """The rows of the input by outcome, and the prompts by length."""

    total: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)  # without a prompt
    by_alteration: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # prompts by number of tokens
    trained_tokens: int = 0
    untrained: int = 0  # prompts without a trained token

    def add(self, prompt: Prompt) -> None:
        self.lengths[prompt.num_tokens] += 1
        self.trained_tokens += prompt.num_trained
        self.untrained += not prompt.num_trained
        self.by_alteration.update(alteration.value for alteration in prompt.alterations)

    @property
    def num_prompts(self) -> int:
        """Prompts to send."""
        return self.lengths.total()

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * count for length, count in self.lengths.items())

    def quantiles(self) -> dict[str, int]:
        """For each of QUANTILES, the length in tokens that this share of the prompts does not
        exceed; and the extremes."""
        if not self.lengths:
            return {}
        shown = {"min": min(self.lengths)}
        so_far = 0
        wanted = deque(QUANTILES)
        for length in sorted(self.lengths):
            so_far += self.lengths[length]
            while wanted and so_far >= wanted[0] * self.num_prompts:
                shown[f"p{wanted.popleft() * 100:g}"] = length
        return {**shown, "max": max(self.lengths)}


class FairSample:
    """Up to SAMPLED prompts, each of those seen with the same probability."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self._num_seen = 0
        self._chance = random.Random(0)

    def add(self, prompt: Prompt) -> None:
        self._num_seen += 1
        if len(self.prompts) < SAMPLED:
            self.prompts.append(prompt)
        elif (place := self._chance.randrange(self._num_seen)) < SAMPLED:
            self.prompts[place] = prompt


@dataclass(kw_only=True)
class Forecast:
    """The size of a run's output and dumps, filled row by row."""

    admission: Admission
    limits: Limits | None  # None: unknown, without a server
    room: Room | None  # None: the states' shape is unknown
    num_held: int  # most prompts whose dumps can lie under the dump root at a time
    shard_bytes: int
    num_movers: int
    rows: RowCounts = field(init=False, default_factory=RowCounts)
    sample: FairSample = field(init=False, default_factory=FairSample)
    data_bytes: int = field(init=False, default=0)
    _largest: list[int] = field(init=False, default_factory=list)  # a heap of the largest dumps

    def add(self, row: Prompt | BadRow) -> None:
        """Count one row as a run would. Raises RowRefused where the policy asks for a stop."""
        self.rows.total += 1
        judged = self.admission.judge(row)
        if isinstance(judged, Refusal):
            self.rows.by_reason[judged.reason.value] += 1
            return
        self.rows.add(judged)
        self.sample.add(judged)
        if self.room is not None:
            self.data_bytes += sample_bytes(judged.num_tokens, self.room.layout)
            if self.limits is not None:
                size = dump_bytes(judged.num_tokens, self.room.layout, self.limits)
                keep = heapq.heappush if len(self._largest) < self.num_held else heapq.heappushpop
                keep(self._largest, size)

    @property
    def shm_peak_bytes(self) -> int | None:
        """Most bytes under the dump root; None: unknown."""
        if self.room is None or self.limits is None:
            return None
        return min(self.room.budget_bytes, sum(self._largest))

    @property
    def num_shards(self) -> int | None:
        """About how many files there will be; None: unknown."""
        if self.room is None:
            return None
        num_prompts = self.rows.num_prompts
        by_size = -(-self.data_bytes // self.shard_bytes)
        by_header = -(-num_prompts // samples_that_fit(MAX_ROOM_BYTES, self.room.layout))
        return max(by_size, by_header, min(self.num_movers, num_prompts))

    @property
    def output_bytes(self) -> int | None:
        """Bytes of all shards, headers included; None: unknown."""
        if self.room is None or not (num_shards := self.num_shards):
            return None if self.room is None else 0
        per_shard = -(-self.rows.num_prompts // num_shards)
        return self.data_bytes + num_shards * header_room(per_shard, self.room.layout)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The prefill speed of the servers, as measured."""

    tokens_per_s: float
    num_prompts: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of `extractor run --dry-run`."""

    forecast: Forecast
    speed: Speed | None
    why_no_speed: str
    free_bytes: int  # where the data set would be written

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor run --dry-run --json`."""
        counts, speed = self.forecast.rows, self.speed
        return {
            "rows": counts.total,
            "prompts": counts.num_prompts,
            "failed": dict(sorted(counts.by_reason.items())),
            "altered": dict(sorted(counts.by_alteration.items())),
            "untrained": counts.untrained,
            "tokens": counts.num_tokens,
            "trained_tokens": counts.trained_tokens,
            "lengths": counts.quantiles(),
            "bytes": self.forecast.output_bytes,
            "shards": self.forecast.num_shards,
            "shm_peak_bytes": self.forecast.shm_peak_bytes,
            "tokens_per_s": None if speed is None else speed.tokens_per_s,
            "eta_s": None if speed is None else counts.num_tokens / speed.tokens_per_s,
            "free_bytes": self.free_bytes,
        }

    def to_text(self) -> str:
        """The output of `extractor run --dry-run`."""
        counts, speed = self.forecast.rows, self.speed
        rows = [("prompts to send", f"{counts.num_prompts:,}")]
        rows.append(("rows without one", f"{sum(counts.by_reason.values()):,}"))
        rows += [(f"  {name}", f"{count:,}") for name, count in sorted(counts.by_reason.items())]
        rows.append(("rows in all", f"{counts.total:,}"))
        rows.append(("tokens", f"{counts.num_tokens:,}"))
        rows += [(f"  {name} of a prompt", f"{n:,}") for name, n in counts.quantiles().items()]
        rows.append(("trained tokens", f"{counts.trained_tokens:,}"))
        if counts.untrained:
            rows.append(("prompts without a trained token", f"{counts.untrained:,}"))
        for name, count in sorted(counts.by_alteration.items()):
            rows.append((f"prompts {name}", f"{count:,}"))
        output, peak = self.forecast.output_bytes, self.forecast.shm_peak_bytes
        if output is not None:
            rows.append(("bytes to write", amount(output)))
            rows.append(("free there", amount(self.free_bytes)))
            rows.append(("shard files, about", f"{self.forecast.num_shards:,}"))
        if peak is not None:
            rows.append(("peak /dev/shm", amount(peak)))
        if speed is not None:
            rows.append(("speed of the server", f"{speed.tokens_per_s:,.0f} tok/s"))
            rows.append(("estimated time", duration(counts.num_tokens / speed.tokens_per_s)))
        lines = [table(rows)]
        if output is None:
            lines.append(
                "Bytes are not known: that takes a server with the plugin, or --model FOLDER."
            )
        elif output * 1.05 > self.free_bytes:
            lines.append("That does not fit: free space, or name another --out.")
        if speed is None:
            lines.append(f"The time is not known: {self.why_no_speed}")
        else:
            lines.append(
                f"Measured with {speed.num_prompts} of the prompts in {speed.seconds:.1f} s, "
                "without dumps."
            )
        return "\n".join(lines)

"""What a run would do, from the rows alone: counts, lengths, bytes. Pure; memory does not grow
with the number of rows."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable
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
class Forecast:
    """Filled row by row."""

    admission: Admission
    limits: Limits | None  # None where no server told them
    room: Room | None  # None where the states' shape is not known
    num_held: int  # most prompts whose dumps can lie under the dump root at a time
    shard_bytes: int
    num_movers: int

    num_rows: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    by_alteration: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # prompts by number of tokens
    trained_tokens: int = 0
    untrained: int = 0
    data_bytes: int = 0
    sample: list[Prompt] = field(default_factory=list)
    _largest: list[int] = field(default_factory=list)  # a heap of the largest dumps
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, row: Prompt | BadRow) -> None:
        """Count one row as a run would. Raises RowRefused where the policy asks for a stop."""
        self.num_rows += 1
        judged = self.admission.judge(row)
        if isinstance(judged, Refusal):
            self.by_reason[judged.reason.value] += 1
            return
        self.lengths[judged.num_tokens] += 1
        self.trained_tokens += judged.num_trained
        self.untrained += not judged.num_trained
        self.by_alteration.update(alteration.value for alteration in judged.alterations)
        if self.room is not None:
            self.data_bytes += sample_bytes(judged.num_tokens, self.room.layout)
            if self.limits is not None:
                size = dump_bytes(judged.num_tokens, self.room.layout, self.limits)
                keep = heapq.heappush if len(self._largest) < self.num_held else heapq.heappushpop
                keep(self._largest, size)
        self._take_sample(judged)

    def _take_sample(self, prompt: Prompt) -> None:
        if len(self.sample) < SAMPLED:
            self.sample.append(prompt)
        elif (place := self._chance.randrange(self.num_prompts)) < SAMPLED:
            self.sample[place] = prompt

    @property
    def num_prompts(self) -> int:
        """How many prompts would be sent."""
        return self.lengths.total()

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return sum(length * count for length, count in self.lengths.items())

    @property
    def shm_peak_bytes(self) -> int | None:
        """Most bytes under the dump root; None where that is not known."""
        if self.room is None or self.limits is None:
            return None
        return min(self.room.budget_bytes, sum(self._largest))

    @property
    def num_shards(self) -> int | None:
        """About how many files there will be; None where that is not known."""
        if self.room is None:
            return None
        by_size = -(-self.data_bytes // self.shard_bytes)
        by_header = -(-self.num_prompts // samples_that_fit(MAX_ROOM_BYTES, self.room.layout))
        return max(by_size, by_header, min(self.num_movers, self.num_prompts))

    @property
    def output_bytes(self) -> int | None:
        """Bytes of all shards, headers included; None where that is not known."""
        if self.room is None or not (num_shards := self.num_shards):
            return None if self.room is None else 0
        per_shard = -(-self.num_prompts // num_shards)
        return self.data_bytes + num_shards * header_room(per_shard, self.room.layout)

    def quantiles(self) -> dict[str, int]:
        """Lengths in tokens that so many of the prompts do not exceed."""
        if not self.lengths:
            return {}
        wanted = {f"p{quantile * 100:g}": quantile for quantile in QUANTILES}
        return {
            "min": min(self.lengths),
            **dict(zip(wanted, _quantiles(self.lengths, wanted.values()), strict=True)),
            "max": max(self.lengths),
        }


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a probe of the server measured."""

    tokens_per_s: float
    num_prompts: int
    seconds: float


def forecast_document(forecast: Forecast, speed: Speed | None) -> dict[str, Any]:
    """The stable JSON of `extractor run --dry-run --json`."""
    return {
        "rows": forecast.num_rows,
        "prompts": forecast.num_prompts,
        "failed": dict(sorted(forecast.by_reason.items())),
        "altered": dict(sorted(forecast.by_alteration.items())),
        "untrained": forecast.untrained,
        "tokens": forecast.num_tokens,
        "trained_tokens": forecast.trained_tokens,
        "lengths": forecast.quantiles(),
        "bytes": forecast.output_bytes,
        "shards": forecast.num_shards,
        "shm_peak_bytes": forecast.shm_peak_bytes,
        "tokens_per_s": None if speed is None else speed.tokens_per_s,
        "eta_s": None if speed is None else forecast.num_tokens / speed.tokens_per_s,
    }


def forecast_text(
    forecast: Forecast, speed: Speed | None, *, free_bytes: int, why_no_speed: str
) -> str:
    """What `extractor run --dry-run` prints."""
    rows = [("prompts to send", f"{forecast.num_prompts:,}")]
    rows.append(("rows without one", f"{sum(forecast.by_reason.values()):,}"))
    rows += [(f"  {name}", f"{count:,}") for name, count in sorted(forecast.by_reason.items())]
    rows.append(("rows in all", f"{forecast.num_rows:,}"))
    rows.append(("tokens", f"{forecast.num_tokens:,}"))
    rows += [(f"  {name} of a prompt", f"{n:,}") for name, n in forecast.quantiles().items()]
    rows.append(("trained tokens", f"{forecast.trained_tokens:,}"))
    if forecast.untrained:
        rows.append(("prompts without a trained token", f"{forecast.untrained:,}"))
    for name, count in sorted(forecast.by_alteration.items()):
        rows.append((f"prompts {name}", f"{count:,}"))
    output, peak = forecast.output_bytes, forecast.shm_peak_bytes
    if output is not None:
        rows.append(("bytes to write", amount(output)))
        rows.append(("free there", amount(free_bytes)))
        rows.append(("shard files, about", f"{forecast.num_shards:,}"))
    if peak is not None:
        rows.append(("most bytes of dumps at a time", amount(peak)))
    if speed is not None:
        rows.append(("speed of the server", f"{speed.tokens_per_s:,.0f} tok/s"))
        rows.append(("time it will take", duration(forecast.num_tokens / speed.tokens_per_s)))
    lines = [table(rows)]
    if output is None:
        lines.append("Bytes are not known: that takes a server with the plugin, or --model FOLDER.")
    elif output * 1.05 > free_bytes:
        lines.append("That does not fit: free space, or name another --out.")
    if speed is None:
        lines.append(f"The time is not known: {why_no_speed}")
    else:
        lines.append(
            f"Measured with {speed.num_prompts} of the prompts in {speed.seconds:.1f} s, "
            "without dumps."
        )
    return "\n".join(lines)


def _quantiles(counts: Counter[int], quantiles: Iterable[float]) -> list[int]:
    total = counts.total()
    found = []
    for quantile in quantiles:
        seen = 0
        for length in sorted(counts):
            seen += counts[length]
            if seen >= quantile * total:
                found.append(length)
                break
    return found

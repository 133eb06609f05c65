"""Assigns the rows of a forward to our requests. Pure; no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SpanError(ValueError):
    """The batch contradicts itself, so its rows cannot be assigned to requests."""


class Span(NamedTuple):
    """Consecutive rows of one forward that belong to one request."""

    rid: str
    start: int  # position in the prompt of the first row
    begin: int  # first row within the forward
    rows: int

    @property
    def end(self) -> int:
        return self.begin + self.rows


def is_ours(rid: object, rid_prefix: str) -> bool:
    """Whether this is the rid of a request to dump. The engine's dummies may have any rid."""
    return isinstance(rid, str) and rid.startswith(rid_prefix)


def plan_spans(
    *,
    rids: Sequence[str],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    rid_prefix: str,
    total_rows: int,
    live_rows: int | None = None,
    prompt_lens: Sequence[int] | None = None,
) -> list[Span]:
    """Spans of the requests whose rid starts with `rid_prefix`, in batch order.

    rids: every request of the batch, foreign ones too: their rows move the offset as well.
    extend_lens, prefix_lens: per request, rows in this forward and tokens before them. May be
        longer than `rids` (padding requests), and then only the first len(rids) count.
    total_rows: rows of the state tensors, padding included.
    live_rows: tokens before padding, where the engine says so.
    prompt_lens: per request, tokens of its prompt, where known. Rows past the prompt are decoded
        tokens that ride in an extend batch (mixed chunks, recomputation after retraction); they
        are not the prompt's and are left out.
    Raises SpanError.
    """
    count = len(rids)
    if len(extend_lens) < count or len(prefix_lens) < count:
        raise SpanError(
            f"{count} requests, but {len(extend_lens)} lengths and {len(prefix_lens)} prefixes"
        )
    if prompt_lens is not None and len(prompt_lens) != count:
        raise SpanError(f"{count} requests, but {len(prompt_lens)} prompt lengths")
    if any(extend_lens[i] < 0 for i in range(len(extend_lens))):
        raise SpanError(f"negative length among {list(extend_lens)}")
    used_rows = sum(extend_lens[:count])
    if used_rows > total_rows:
        raise SpanError(f"requests have {used_rows} rows, the states only {total_rows}")
    if live_rows is not None and used_rows != live_rows:
        raise SpanError(f"requests have {used_rows} rows, the batch {live_rows}")
    spans = []
    begin = 0
    for index, rid in enumerate(rids):
        length, start = int(extend_lens[index]), int(prefix_lens[index])
        if is_ours(rid, rid_prefix):
            rows = length
            if prompt_lens is not None:
                rows = min(length, int(prompt_lens[index]) - start)
            if start < 0:
                raise SpanError(f"{rid}: negative prefix length {start}")
            if rows > 0:
                spans.append(Span(rid=rid, start=start, begin=begin, rows=rows))
        begin += length
    return spans


def split_spans(spans: Sequence[Span], *, max_rows: int) -> list[list[Span]]:
    """Groups of spans that each lie within `max_rows` consecutive rows of the forward.

    A span longer than that is cut; its parts keep their positions, so they tile the whole.
    """
    if spans and spans[-1].end - spans[0].begin <= max_rows:
        return [list(spans)]
    groups: list[list[Span]] = []
    group: list[Span] = []
    for span in spans:
        begin = span.begin
        while begin < span.end:
            first = group[0].begin if group else begin
            room = first + max_rows - begin
            if room <= 0:
                groups.append(group)
                group = []
                continue
            rows = min(room, span.end - begin)
            start = span.start + begin - span.begin
            group.append(Span(rid=span.rid, start=start, begin=begin, rows=rows))
            begin += rows
    if group:
        groups.append(group)
    return groups

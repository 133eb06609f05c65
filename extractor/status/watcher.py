"""Watches a run of another process until it ends, for `extractor status --watch`.

It reads `.live.json` and the manifest's tallies. The manifest is opened for each look: an open
connection would keep the run from closing it as one plain file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extractor.core.identity import Identity
from extractor.core.locations import MANIFEST_NAME
from extractor.core.timings import DEFAULT_TIMINGS, StatusTimings
from extractor.status.live_file import Live, read_live
from extractor.system.lock import writer_of
from manifest.exceptions import ManifestError, ManifestMissing
from manifest.records import Source, Totals
from manifest.states import State
from manifest.store import Store


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The manifest of a run that has begun."""

    identity: Identity
    sources: tuple[Source, ...]
    totals: Totals

    @classmethod
    def read(cls, store: Store, *, with_alterations: bool) -> Begun:
        """`with_alterations`: count them, which reads every row. Raises ConfigMismatch where no
        data set has begun."""
        return cls(
            identity=Identity.from_document(store.identity()),
            sources=tuple(store.sources()),
            totals=store.totals(with_alterations=with_alterations),
        )

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return sum(source.num_rows for source in self.sources)

    @property
    def num_unread(self) -> int:
        """Rows that no session has reached yet."""
        return self.num_rows - self.totals.num_rows

    @property
    def num_settled(self) -> int:
        states = self.totals.by_state
        return states.get(State.STORED, 0) + states.get(State.FAILED, 0)

    @property
    def num_left(self) -> int:
        return self.num_rows - self.num_settled


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run at one moment."""

    out: Path
    begun: Begun | None  # None until the run has reached its first prompt
    live: Live | None  # of the running session; after the end, of the last that was seen
    writer: int | None  # pid of the process that is at work in `out`

    @property
    def is_over(self) -> bool:
        return self.writer is None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_over and self.begun is not None and not self.begun.num_left


class Watcher:
    """Looks at the run in `out`. Raises ManifestMissing where there is none."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._last_live: Live | None = None

    def look(self) -> Look:
        # In this order: a run that ends between the two was still at work when it was looked at,
        # and the next look finds it over with everything in the manifest.
        live = read_live(self._out)
        writer = writer_of(self._out)
        if writer is None and live is not None:
            writer = live.pid  # of another PID namespace, where the lock cannot be seen into
        if live is not None:
            self._last_live = live
        # While it waits for its server, or ends, its last document no longer holds.
        shown = self._last_live if writer is None else live
        return Look(out=self._out, begun=self._begun(writer), live=shown, writer=writer)

    def _begun(self, writer: int | None) -> Begun | None:
        try:
            store = Store.open_read_only(self._out / MANIFEST_NAME)
        except ManifestError:
            if writer is None:
                raise
            return None  # it is being created
        try:
            if writer is not None and not store.identity():
                return None
            return Begun.read(store, with_alterations=False)
        finally:
            store.close()


def watch(
    out: Path,
    show: Callable[[Look], None],
    *,
    interval_s: float,
    timings: StatusTimings = DEFAULT_TIMINGS.status,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Look:
    """Show a look every `interval_s` until the run is over; the last look, which is shown too.

    An end is noticed within `look_interval_s`, however long the interval. Where nothing is at work
    and rows are left, wait `patience_s` for a run that is only starting. Raises ManifestMissing
    where there is no run, UsageError where none got as far as its first prompt.
    """
    watcher = Watcher(out)
    next_s = clock()
    give_up_s = next_s + timings.patience_s
    while True:
        try:
            look = watcher.look()
        except ManifestMissing:
            if clock() >= give_up_s:
                raise
            sleep(timings.look_interval_s)
            continue
        if not look.is_over:
            give_up_s = float("-inf")  # it was seen: its end is the end
        elif not look.is_done and clock() < give_up_s:
            sleep(timings.look_interval_s)
            continue
        if look.is_over or clock() >= next_s:
            next_s = clock() + interval_s
            show(look)
        if look.is_over:
            return look
        sleep(timings.look_interval_s)

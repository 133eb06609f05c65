"""Edge: names that appear in directories, as the kernel tells of them (inotify).

A finished file is moved to its name: that move is reported. Now and then the directories are listed
as well, for what the kernel does not report (a file that was not moved there, a queue that
overflowed, a user without a free inotify instance).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from inotify_simple import INotify, flags

from extractor.core.timings import DEFAULT_TIMINGS, ListingTimings
from server_patch.directory import Directory

_NEWS = flags.MOVED_TO
_LOSSES = flags.Q_OVERFLOW | flags.IGNORED | flags.UNMOUNT


class DirectoryWatch:
    """Reports each new name of a regular file in some directories once."""

    def __init__(
        self,
        directories: Sequence[Directory],
        *,
        is_wanted: Callable[[str], bool],
        timings: ListingTimings = DEFAULT_TIMINGS.collect.listing,
    ) -> None:
        """`is_wanted`: by name alone; all others are never reported."""
        self._timings = timings
        self._directories = tuple(directories)
        self._is_wanted = is_wanted
        self._reported: dict[Directory, set[str]] = {place: set() for place in directories}
        self._skipped: dict[Directory, frozenset[str]] = {
            place: frozenset() for place in directories
        }
        self._listed_at = -float("inf")
        self._listing_s = 0.0  # duration of the last listing
        self._found_any = False
        self._watched: dict[int, Directory] = {}
        self._notify: INotify | None = None
        with suppress(OSError):
            self._notify = INotify()
            weakref.finalize(self, self._notify.close)
            self._watched = {
                # Not by its path, which may lead elsewhere by now.
                self._notify.add_watch(
                    f"/proc/self/fd/{place.descriptor}", _NEWS | flags.ONLYDIR
                ): place
                for place in directories
            }

    @property
    def _is_told(self) -> bool:
        return self._notify is not None and len(self._watched) == len(self._directories)

    def poll(self) -> list[tuple[Directory, str]]:
        """Directory and name of what appeared since the last poll, in order of name within each.

        Raises OSError when a directory is gone.
        """
        found: dict[Directory, set[str]] = {place: set() for place in self._directories}
        # Listed first: what moves in meanwhile is told, and then known twice, not never.
        timings = self._timings
        interval_s = timings.interval_s * max(1.0, self._listing_s / timings.cost_s)
        if not self._is_told or time.monotonic() - self._listed_at >= interval_s:
            self._list(found)
        else:
            for place in self._directories:
                place.require_linked()  # the kernel tells it only when nobody has it open
        if not self._take_told(found):
            self._list(found)
        news = [
            (place, name)
            for place, names in found.items()
            for name in sorted(names - self._reported[place])
        ]
        for place, name in news:
            self._reported[place].add(name)
        self._found_any = bool(news)
        return news

    def skip(self) -> None:
        """Never report the files that exist now."""
        with suppress(FileNotFoundError):  # the next poll raises it again
            self.poll()
        self._skipped = {place: frozenset(names) for place, names in self._reported.items()}

    def report_again(self) -> None:
        """Report every existing file again, except skipped ones."""
        self._reported = {place: set(names) for place, names in self._skipped.items()}
        self._listed_at = -float("inf")

    async def wait(self) -> None:
        """Return when there may be something to poll."""
        timings = self._timings
        if not self._is_told:
            pause_s = timings.busy_pause_s if self._found_any else timings.idle_pause_s
            await asyncio.sleep(max(pause_s, timings.pauses * self._listing_s))
            return
        assert self._notify is not None
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        loop.add_reader(self._notify.fileno(), told.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timings.interval_s):
                    await told.wait()
        finally:
            loop.remove_reader(self._notify.fileno())
        await asyncio.sleep(timings.busy_pause_s)  # what comes together is taken together

    def _list(self, found: dict[Directory, set[str]]) -> None:
        began_at = time.monotonic()
        for place in self._directories:
            names = {name for name in place.file_names() if self._is_wanted(name)}
            found[place] |= names
            # A vanished name need not be remembered: a writer uses none twice.
            self._reported[place] &= names
        self._listed_at = time.monotonic()
        self._listing_s = self._listed_at - began_at

    def _take_told(self, found: dict[Directory, set[str]]) -> bool:
        """Add what the kernel told; whether it told everything."""
        is_all = True
        for event in self._notify.read(timeout=0) if self._notify is not None else ():
            if event.mask & _LOSSES:
                is_all = False
            elif self._is_wanted(event.name):
                place = self._watched[event.wd]
                if place.is_regular(event.name):
                    found[place].add(event.name)
        return is_all

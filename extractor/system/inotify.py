"""Edge: names that appear in directories, as the kernel tells of them (inotify).

A finished file is moved to its name: that move is reported. Now and then the directories are listed
as well, for what the kernel does not report (a file that was not moved there, a queue that
overflowed, a user without a free inotify instance).
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

from extractor.core.timings import DEFAULT_TIMINGS, ListingTimings
from extractor.system.files import is_regular

_NEWS = flags.MOVED_TO
_LOSSES = flags.Q_OVERFLOW | flags.IGNORED | flags.UNMOUNT


class DirectoryWatch:
    """Reports each new name of a regular file in some directories once."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        is_wanted: Callable[[str], bool],
        timings: ListingTimings = DEFAULT_TIMINGS.collect.listing,
    ) -> None:
        """`is_wanted`: by name alone; all others are never reported."""
        self._timings = timings
        self._directories = tuple(directories)
        self._is_wanted = is_wanted
        self._reported: dict[Path, set[str]] = {path: set() for path in directories}
        self._skipped: dict[Path, frozenset[str]] = {path: frozenset() for path in directories}
        self._listed_at = -float("inf")
        self._listing_s = 0.0  # duration of the last listing
        self._found_any = False
        self._watched: dict[int, Path] = {}
        self._notify: INotify | None = None
        with suppress(OSError):
            self._notify = INotify()
            weakref.finalize(self, self._notify.close)
            self._watched = {
                self._notify.add_watch(path, _NEWS | flags.ONLYDIR): path for path in directories
            }

    @property
    def _is_told(self) -> bool:
        return self._notify is not None and len(self._watched) == len(self._directories)

    def poll(self) -> list[tuple[Path, str]]:
        """Directory and name of what appeared since the last poll, in order of name within each.

        Raises OSError when a directory is gone.
        """
        found: dict[Path, set[str]] = {path: set() for path in self._directories}
        # Listed first: what moves in meanwhile is told, and then known twice, not never.
        timings = self._timings
        interval_s = timings.interval_s * max(1.0, self._listing_s / timings.cost_s)
        if not self._is_told or time.monotonic() - self._listed_at >= interval_s:
            self._list(found)
        if not self._take_told(found):
            self._list(found)
        news = [
            (path, name)
            for path, names in found.items()
            for name in sorted(names - self._reported[path])
        ]
        for path, name in news:
            self._reported[path].add(name)
        self._found_any = bool(news)
        return news

    def skip(self) -> None:
        """Never report the files that exist now."""
        with suppress(FileNotFoundError):  # the next poll raises it again
            self.poll()
        self._skipped = {path: frozenset(names) for path, names in self._reported.items()}

    def report_again(self) -> None:
        """Report every existing file again, except skipped ones."""
        self._reported = {path: set(names) for path, names in self._skipped.items()}
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

    def _list(self, found: dict[Path, set[str]]) -> None:
        began_at = time.monotonic()
        for path in self._directories:
            with os.scandir(path) as entries:
                names = {
                    entry.name
                    for entry in entries
                    if self._is_wanted(entry.name) and entry.is_file(follow_symlinks=False)
                }
            found[path] |= names
            # A vanished name need not be remembered: a writer uses none twice.
            self._reported[path] &= names
        self._listed_at = time.monotonic()
        self._listing_s = self._listed_at - began_at

    def _take_told(self, found: dict[Path, set[str]]) -> bool:
        """Add what the kernel told; whether it told everything."""
        is_all = True
        for event in self._notify.read(timeout=0) if self._notify is not None else ():
            if event.mask & _LOSSES:
                is_all = False
            elif self._is_wanted(event.name):
                path = self._watched[event.wd]
                if is_regular(f"{path}/{event.name}"):
                    found[path].add(event.name)
        return is_all

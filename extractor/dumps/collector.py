"""Ties arrivals to the requests that wait for them, while a run is going on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from extractor.core.checks import check_header
from extractor.core.errors import ConfigMismatch, PluginError, ServerError
from extractor.core.failure import Failure
from extractor.core.locations import DumpRoot
from extractor.core.timings import DEFAULT_TIMINGS, CollectTimings
from extractor.dumps.correlator import Correlator, Match, Piece
from extractor.dumps.discovery import is_alive, scan_writers
from extractor.dumps.dump_reader import (
    Arrival,
    BrokenFile,
    DumpFile,
    DumpPiece,
    DumpWatcher,
    ErrorFile,
    Rank,
)
from manifest.states import Reason
from server_patch.dump_format import DumpHeader, Ready

logger = logging.getLogger(__name__)

Collected = Sequence[DumpPiece] | Failure


class Collector:
    """Files of rids that begin with `rid_prefix` are ours: they end with a waiting request or are
    removed. All others belong to other runs and are left alone."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        rid_prefix: str,
        is_skipping: bool = False,
        timings: CollectTimings = DEFAULT_TIMINGS.collect,
    ) -> None:
        """`is_skipping`: ignore all files that exist now; they cannot be ours."""
        self._ranks = tuple(ranks)
        self._timings = timings
        self._watcher = DumpWatcher(
            ranks,
            rid_prefix=rid_prefix,
            # Opening a small dump a second time would cost more than keeping its bytes.
            whole_bytes=timings.whole_bytes,
            is_skipping=is_skipping,
            timings=timings,
        )
        self._correlator = Correlator[DumpFile]()
        self._waiting: dict[str, asyncio.Future[Collected]] = {}
        self.num_orphans = 0  # late or duplicate dumps of ours that nobody waits for any more
        self.num_broken = 0
        #: Rids that the server may still be at work on, and whose dumps nobody waits for.
        self.abandoned: set[str] = set()

    def expect(self, rid: str, *, num_tokens: int) -> asyncio.Future[Collected]:
        """A future of the pieces that tile the prompt, by start; or of what went wrong.

        Whoever takes the pieces owns their files.
        """
        self._correlator.expect(rid, num_tokens=num_tokens)
        future: asyncio.Future[Collected] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future
        return future

    def rows_seen(self, rid: str) -> int:
        """Rows of `rid` that arrived, while it is waited for."""
        return self._correlator.rows_seen(rid) if rid in self._waiting else 0

    def drop(self, rid: str, collected: asyncio.Future[Collected]) -> None:
        """Stop waiting for `rid` and remove what arrived of it, where nobody takes the pieces."""
        if self._waiting.pop(rid, None) is not None:
            self._remove(self._correlator.close(rid))
        elif collected.done() and not collected.cancelled():
            outcome = collected.result()
            if not isinstance(outcome, Failure):
                self._remove(outcome)

    async def run(self) -> None:
        """Poll until cancelled. Raises what `poll` raises."""
        while True:
            self.poll(most=self._timings.reads_at_once)
            await self._watcher.wait()

    def poll(self, *, most: int | None = None) -> None:
        """Process the files that arrived since the last poll: all of them, or at most `most`.

        Raises PluginError when a dump directory is gone, and ConfigMismatch when a pending request
        ran on weights other than those the server announced.
        """
        try:
            arrivals = self._watcher.poll(most=most)
        except FileNotFoundError as error:
            raise PluginError(
                f"the dump directory {error.filename} is gone",
                "Restart the server and run the same command again.",
            ) from error
        for rank, arrival in arrivals:
            self._take(rank, arrival)

    def sweep(self) -> None:
        """Remove every file of ours, whoever waits for it: for the end of a run."""
        self._watcher.report_again()
        for rid, collected in list(self._waiting.items()):
            self.drop(rid, collected)
        self.poll()

    async def clear(self, *, patience_s: float | None = None) -> None:
        """Sweep until the dumps of abandoned requests came too, for `patience_s` at most (None: as
        long as late dumps may take)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (self._timings.late_dumps_s if patience_s is None else patience_s)
        with suppress(ServerError):
            self.sweep()
            while self.abandoned and loop.time() < until and self._is_served():
                await asyncio.sleep(0.02)
                self.poll()

    def _is_served(self) -> bool:
        return any(is_alive(rank.ready) for rank in self._ranks)

    def _take(self, rank: Rank, arrival: Arrival) -> None:
        match arrival:
            case DumpFile():
                self._take_dump(rank, arrival)
            case ErrorFile(record=record):
                arrival.unlink()
                logger.debug("dump failed rid=%s reason=%s", record.rid, record.reason)
                self.abandoned.discard(record.rid)
                self._settle(record.rid, Failure(reason=Reason.DUMP_FAILED, detail=record.reason))
            case BrokenFile():
                # Whose it is cannot be read. Its request, ours or another's, will miss it and
                # try again; the file itself is of no use to anybody.
                logger.info("broken dump removed path=%s", arrival.path)
                self.num_broken += 1
                arrival.unlink()

    def _take_dump(self, rank: Rank, file: DumpFile) -> None:
        header = file.dump.header
        piece = Piece(start=header.start, rows=header.rows, handle=file)
        match = self._correlator.add(header.rid, piece)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "dump arrived rid=%s start=%d rows=%d match=%s path=%s",
                header.rid, header.start, header.rows, match.name.lower(), file.path,
            )  # fmt: skip
        match match:
            case Match.ORPHAN:
                self.num_orphans += 1
                self.abandoned.discard(header.rid)
                self._remove([piece])
                return
            case Match.CONFLICT:
                self._settle(
                    header.rid,
                    Failure(
                        reason=Reason.DUMP_CORRUPT,
                        detail=f"rows {piece.start} to {piece.end} came twice or lie outside "
                        "the prompt (was the request retracted?)",
                    ),
                )
                return
            case Match.COMPLETE | Match.WAITING:
                if header.weights != rank.ready.weights.id:
                    raise ConfigMismatch(_weights_changed(header, rank.ready))
                failure = check_header(header, rank.ready)
                if failure is not None:
                    self._settle(header.rid, failure)
                elif match is Match.COMPLETE:
                    self._settle(header.rid, None)

    def _settle(self, rid: str, failure: Failure | None) -> None:
        future = self._waiting.pop(rid, None)
        if future is None:
            return
        pieces = self._correlator.close(rid)
        if failure is not None or future.done():
            self._remove(pieces)
        if not future.done():
            future.set_result(pieces if failure is None else failure)

    @staticmethod
    def _remove(pieces: Sequence[DumpPiece]) -> None:
        for piece in pieces:
            piece.handle.unlink()


def _weights_changed(header: DumpHeader, ready: Ready) -> str:
    return (
        f"the weights of the server on port {ready.process.port} were updated during the run: they "
        f"were {ready.weights.id} when it began, request {header.rid} ran on {header.weights}. "
        "No row of the new weights was stored. Restart the server with the old weights and run the "
        "same command, or use another --out for the new ones."
    )


def remove_dumps_of_the_dead(
    root: DumpRoot, *, rid_prefix: str, known: Sequence[Rank] = ()
) -> None:
    """Remove the dumps with this rid prefix that dead servers left under `root`.

    `known`: ranks whose files were read before.
    """
    looked_at = {rank.path: rank for rank in known}
    dead = [looked_at.get(rank.path, rank) for rank in scan_writers(root).dead]
    with suppress(ServerError, FileNotFoundError):  # somebody else may be removing the directory
        Collector(dead, rid_prefix=rid_prefix).sweep()
        remove_unfinished(dead)


def remove_unfinished(dead: Sequence[Rank]) -> None:
    """Remove what servers were writing when they died: nobody will finish it."""
    for rank in dead:
        rank.directory.remove_unfinished()

"""Edge: dumps that an earlier session of this run asked for and did not live to store.

What is whole and still wanted is stored with the same proof as any other dump.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from extractor.core.checks import check_header
from extractor.core.rids import ordinal_of, rid_prefix
from extractor.dumps.correlator import Match, Piece, tile
from extractor.dumps.dump_reader import DumpFile, DumpPiece, DumpWatcher, Rank
from server_patch.dump_format import Ready, StateLayout

#: Pieces of one request after another, by the row that they are of.
Adoptable = Mapping[int, Sequence[Sequence[DumpPiece]]]


def find_adoptable(
    ranks: Sequence[Rank],
    *,
    run_id: str,
    layout: StateLayout,
    is_fit: Callable[[Ready], bool],
    is_wanted: Callable[[int], bool],
) -> Adoptable:
    """This run's dumps under `ranks` whose rows are wanted and whose layout matches.

    `is_fit`: whether rows that a writer computed may be stored."""
    by_request: dict[tuple[int, str], list[DumpPiece]] = {}
    for rank in ranks:
        if rank.ready.layout != layout or not is_fit(rank.ready):
            continue
        with suppress(FileNotFoundError):  # somebody else removes the directory of a dead server
            for _, arrival in DumpWatcher([rank], rid_prefix=rid_prefix(run_id)).poll():
                if not isinstance(arrival, DumpFile):
                    continue
                header = arrival.dump.header
                ordinal = ordinal_of(header.rid, run_id=run_id)
                if ordinal is None or not is_wanted(ordinal):
                    continue
                if check_header(header, rank.ready) or header.weights != rank.ready.weights.id:
                    continue
                piece = Piece(start=header.start, rows=header.rows, handle=arrival)
                by_request.setdefault((ordinal, header.rid), []).append(piece)
    found: dict[int, list[list[DumpPiece]]] = {}
    for (ordinal, _), pieces in by_request.items():
        found.setdefault(ordinal, []).append(sorted(pieces, key=lambda piece: piece.start))
    return found


def whole(requests: Sequence[Sequence[DumpPiece]], num_tokens: int) -> Sequence[DumpPiece] | None:
    """The pieces of the first request that tile the prompt; None where none do."""
    for pieces in requests:
        if tile(pieces, num_tokens) is Match.COMPLETE:
            return pieces
    return None

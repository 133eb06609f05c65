"""The provenance of a data set, from its manifest; also while a run writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from extractor.core.identity import Identity
from extractor.core.locations import MANIFEST_NAME
from manifest.records import ServerStart, Source
from manifest.store import Store


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The model, the prompts and the servers behind the rows of a data set."""

    identity: Identity
    sources: tuple[Source, ...]  # prompt files, in the order of their rows
    server_starts: tuple[ServerStart, ...]  # in the order of use


def read_data_set(out: Path) -> DataSet:
    """Read the provenance of the data set in `out`. Raises ManifestError, UsageError."""
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        return DataSet(
            identity=Identity.from_document(store.identity()),
            sources=tuple(store.sources()),
            server_starts=tuple(store.server_starts()),
        )
    finally:
        store.close()

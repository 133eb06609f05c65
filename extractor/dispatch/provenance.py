"""Edge: proves that all servers of a data set compute the same states, and records their starts.

A start is recorded, in the manifest and in `dataset.json`, before any of its rows is stored, and
only if it computes the same states as the rows stored so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from extractor.core.errors import ConfigMismatch, storage_error
from extractor.core.identity import Identity
from extractor.core.locations import DATASET_NAME
from extractor.servers.canary import NUM_TOKENS, RID, Comparison, compare, encode_canary, ids_of
from extractor.servers.server_facts import (
    Difference,
    Facts,
    differences,
    facts_of,
    facts_of_identity,
)
from extractor.servers.target import Target
from extractor.shards.dataset import dataset_document
from extractor.shards.format import sample_tensors
from extractor.shards.output_dir import OutputDirectory
from extractor.shards.writer import open_shard_name
from extractor.system.files import read_into
from manifest.records import ServerStart
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from server_patch.directory import Directory
from server_patch.dump_format import DumpHeader, Ready

_CANARY = "canary"
#: Stored samples among which one of enough tokens is looked for.
_CANDIDATES = 64
ALLOW_OPTION = "--allow-model-change"


class Provenance:
    """Compares each server start with earlier ones and records it.

    `allow_change`: the first start of this session may differ from the earlier ones. Its rows then
    join rows of another model, by the user's choice; later starts must match it.
    """

    def __init__(
        self,
        owner: StoreOwner,
        output: OutputDirectory,
        identity: Identity,
        starts: Sequence[ServerStart],
        canary: bytes | None,
        *,
        allow_change: bool,
    ) -> None:
        self._owner = owner
        self._output = output
        self._identity = identity
        self._starts = list(starts)
        self._canary = canary  # what the next start is compared with
        self._session = max((start.session + 1 for start in starts), default=0)
        self._allow_change = allow_change
        self._lock = asyncio.Lock()  # two servers may come back at the same time

    @classmethod
    async def load(
        cls, owner: StoreOwner, output: OutputDirectory, identity: Identity, *, allow_change: bool
    ) -> Provenance:
        """Raises ManifestError."""

        def read(store: Store) -> tuple[list[ServerStart], bytes | None]:
            starts = store.server_starts()
            return starts, store.canary() if starts else stored_canary(
                store, output.shards, identity
            )

        starts, canary = await owner.call(read)
        return cls(owner, output, identity, starts, canary, allow_change=allow_change)

    @property
    def canary_ids(self) -> Sequence[int] | None:
        """The tokens of the data set's canary, int32; None before there is one."""
        return None if self._canary is None else ids_of(self._canary).tolist()

    def number_of(self, boot_id: str) -> int | None:
        """The number of the last recorded start with that boot id; None if there is none."""
        numbers = [start.number for start in self._starts if start.boot_id == boot_id]
        return numbers[-1] if numbers else None

    def is_fit(self, ready: Ready) -> bool:
        """Whether rows of that writer may be stored: its boot is recorded, its facts are unchanged,
        and they match every start since the last accepted change."""
        number = self.number_of(ready.boot_id)
        if number is None or self._differences(ready):
            return False
        return bool(self._starts[number].facts == facts_of(ready))

    def check(self, target: Target) -> None:
        """Raise ConfigMismatch if the server's facts do not match the stored rows."""
        found = self._differences(target.ready)
        if found and not self._allow_change:
            raise self._mismatch(target.url, [difference.to_text() for difference in found])

    async def add(self, target: Target, canary: bytes) -> None:
        """Record a server start. `canary`: the states that it computed for `canary_ids`.

        Raises ConfigMismatch if they, or the facts that the server announces, do not match.
        """
        async with self._lock:
            self.check(target)
            accepted = [difference.name for difference in self._differences(target.ready)]
            comparison = None if self._canary is None else compare(self._canary, canary)
            if comparison is not None and not comparison.is_same:
                if not self._allow_change:
                    raise self._canary_mismatch(target.url, comparison)
                accepted.append(_CANARY)
            is_reference = bool(accepted) or not self._starts
            start = ServerStart(
                number=len(self._starts),
                session=self._session,
                used_at=datetime.now(UTC).isoformat(timespec="seconds"),
                url=target.url,
                boot_id=target.ready.boot_id,
                facts=facts_of(target.ready),
                canary_error=None if comparison is None else comparison.error,
                accepted=tuple(accepted),
            )
            await self._owner.call(
                lambda store: store.add_server_start(start, canary if is_reference else None)
            )
            self._starts.append(start)
            self._allow_change = False
            if is_reference:
                self._canary = canary
            self.write()

    def write(self) -> None:
        """Write `dataset.json`. Raises SpaceError, UsageError.

        A file of an older version stays until a start is recorded: it names an engine version.
        """
        out = self._output.out
        try:
            if self._starts or not out.exists(DATASET_NAME):
                self._output.write(DATASET_NAME, dataset_document(self._identity, self._starts))
        except OSError as error:
            raise storage_error(error, where=out.path / DATASET_NAME) from error

    def _differences(self, ready: Ready) -> list[Difference]:
        """The facts in which a server differs from any start since the last accepted change."""
        now = facts_of(ready)
        found: dict[str, Difference] = {}
        for facts in self._current():
            for difference in differences(facts, now):
                found.setdefault(difference.name, difference)
        return list(found.values())

    def _current(self) -> list[Facts]:
        if not self._starts:
            return [facts_of_identity(self._identity)]
        changes = [start.number for start in self._starts if start.accepted]
        return [start.facts for start in self._starts[changes[-1] if changes else 0 :]]

    def _canary_mismatch(self, url: str, comparison: Comparison) -> ConfigMismatch:
        line = (
            f"  canary: {comparison.to_text()}. Nothing that the server announces explains it: "
            "look for other weights, patched code or a faulty device"
        )
        if (last := self._starts[-1:]) and last[0].session == self._session:
            return ConfigMismatch(
                f"the servers at {last[0].url} and {url} differ:\n{line}\nStart them alike, or "
                "leave one out."
            )
        return self._mismatch(url, [line])

    def _mismatch(self, url: str, lines: Sequence[str]) -> ConfigMismatch:
        return ConfigMismatch(
            f"the server at {url} does not compute what {self._output.out.path} holds:\n"
            + "\n".join(lines)
            + "\nStart the server as it was, or use another --out. To put rows of both into one "
            f"data set on purpose, add {ALLOW_OPTION}; the change is recorded."
        )


def stored_canary(store: Store, directory: Directory, identity: Identity) -> bytes | None:
    """The first tokens of a stored sample and their states, as a canary: for a data set whose rows
    are older than the record of server starts. None where nothing can be read.

    A causal model computes the same states for them whatever follows.
    """
    layout = identity.layout
    shards = {shard.number: shard for shard in store.shards()}
    rows = [
        row
        for row in store.first_stored(_CANDIDATES)
        if row.prompt.num_tokens and row.sample.shard in shards
    ]
    for row in sorted(rows, key=lambda row: -min(row.prompt.num_tokens, NUM_TOKENS)):
        shard = shards[row.sample.shard]
        name = shard.name if directory.exists(shard.name) else open_shard_name(shard)
        num_tokens = min(row.prompt.num_tokens, NUM_TOKENS)
        tensors: dict[str, bytes] = {}
        try:
            descriptor, _ = directory.open_file(name)
            with open(descriptor, "rb") as file:
                for tensor in sample_tensors(row.prompt.num_tokens, layout):
                    width = (tensor.end - tensor.begin) // row.prompt.num_tokens
                    data = bytearray(num_tokens * width)
                    read_into(file.fileno(), memoryview(data), row.sample.offset + tensor.begin)
                    tensors[tensor.name] = bytes(data)
        except (OSError, EOFError):
            continue  # `reconcile` has the lost ones extracted again
        header = DumpHeader(
            rid=RID,
            start=0,
            rows=num_tokens,
            layout=layout,
            boot_id=RID,
            rank=0,
            counter=0,
        )
        return encode_canary(header, tensors)
    return None

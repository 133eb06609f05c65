"""What a run is and how far earlier sessions came with it, as the manifest has it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from extractor import __version__
from extractor.config import Identity, RunOptions
from extractor.measurements import Counters
from manifest.owner import StoreOwner
from manifest.records import Source
from manifest.store import Store
from prompts.inputs import InputFile

RUN_ID = "run_id"
#: Most files that a message names.
MAX_NAMES = 4


@dataclass(kw_only=True)
class RunState:
    """What earlier sessions left, and the numbers of this one."""

    run_id: str
    settled: bytearray  # 1 for each row that needs no more work, by ordinal
    attempts: dict[int, int]
    suspects: dict[int, int]  # rows that a dying server had not answered -> how often
    counters: Counters
    is_new: bool

    @classmethod
    async def load(
        cls, owner: StoreOwner, files: Sequence[InputFile], counters: Counters
    ) -> RunState:
        """`counters`: of this session, which goes on counting where a server came back."""
        num_rows = sum(file.num_rows for file in files)

        def read(store: Store) -> RunState:
            identity = store.identity()
            settled = bytearray(num_rows)
            for begin, end in store.settled_ranges():
                span = range(num_rows)[begin:end]
                settled[span.start : span.stop] = b"\x01" * len(span)
            return cls(
                run_id=identity.get(RUN_ID) or secrets.token_hex(4),
                settled=settled,
                attempts=store.attempts(),
                suspects=store.suspects(),
                counters=counters,
                is_new=not identity,
            )

        state = await owner.call(read)
        counters.num_rows = num_rows
        counters.settled_before = state.settled.count(1) - counters.stored - counters.failed
        return state

    def forget(self, ordinals: Sequence[int]) -> None:
        """These rows need work again."""
        for ordinal in ordinals:
            self.settled[ordinal] = 0
        self.counters.settled_before -= len(ordinals)

    def settle(self, ordinal: int) -> None:
        """This row needs no more work."""
        self.settled[ordinal] = 1

    def is_settled(self, ordinal: int) -> bool:
        """Whether the row needs no more work; so does none that the input does not have."""
        return ordinal >= len(self.settled) or bool(self.settled[ordinal])

    @property
    def is_finished(self) -> bool:
        return not self.is_new and self.counters.settled == self.counters.num_rows


async def begin_or_continue(
    owner: StoreOwner,
    out: Path,
    identity: Identity,
    files: Sequence[InputFile],
    state: RunState,
) -> Identity:
    """What the data set is of, as the manifest has it. Raises ConfigMismatch."""
    if state.is_new:
        sources = [
            Source(
                number=number,
                path=file.path,
                size_bytes=file.size_bytes,
                digest=file.digest,
                num_rows=file.num_rows,
            )
            for number, file in enumerate(files)
        ]
        document = {**identity.to_document(), RUN_ID: state.run_id, "version": __version__}
        await owner.call(lambda store: store.begin(document, sources))
        return identity
    begun_with = await begun_with_identity(owner)
    identity.require_same(begun_with, out=out)
    await owner.call(lambda store: store.reopen_unfinished())
    return begun_with


async def begun_with_identity(owner: StoreOwner) -> Identity:
    """What the data set is of, by the manifest. Raises ConfigMismatch when that is unreadable."""
    return Identity.from_document(await owner.call(lambda store: store.identity()))


async def require_same_inputs(
    owner: StoreOwner, options: RunOptions, files: Sequence[InputFile]
) -> None:
    """Raise ConfigMismatch for other prompts than the manifest's; this needs no server."""
    begun_with = await begun_with_identity(owner)
    now = replace(
        begun_with,
        inputs=tuple(file.digest for file in files),
        reading=options.reading_document,
    )
    other_inputs = None
    if now.inputs != begun_with.inputs:
        other_inputs = difference_of(await owner.call(Store.sources), files)
    now.require_same(begun_with, out=options.out, other_inputs=other_inputs)


def difference_of(before: Sequence[Source], now: Sequence[InputFile]) -> str:
    """In which way the files of a run differ from those that its data set was begun with."""
    then, these = [source.digest for source in before], [file.digest for file in now]
    names_then = _listed(source.path for source in before)
    names_now = _listed(file.path for file in now)
    if sorted(then) == sorted(these):
        return f"the same files in another order: begun with {names_then}, now {names_now}"
    if len(then) == len(these):
        changed = _listed(
            file.path
            for source, file in zip(before, now, strict=True)
            if source.digest != file.digest and source.path == file.path
        )
        if changed:
            return f"the content of {changed} is not what it was"
    return f"other files: begun with {names_then}, now {names_now}"


def _listed(paths: Iterable[str]) -> str:
    names = list(paths)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more

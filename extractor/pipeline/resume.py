"""Continues a data set: the state that earlier sessions left, and checks that nothing changed."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from extractor.core.counters import Counters
from extractor.core.errors import ConfigMismatch, CorruptData
from extractor.core.humanize import quoted
from extractor.core.identity import Identity
from extractor.core.run_options import RunOptions
from extractor.core.version import __version__
from extractor.intake.prompt_stream import prompts_of
from manifest.records import Source
from manifest.row_changes import PROMPT_CHANGED
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from prompts.ambient import parse_moment
from prompts.inputs import InputFile
from prompts.pool import RendererPool, library_versions
from prompts.types import Alteration, BadRow, Prompt

RUN_ID = "run_id"
#: A part of the rids of its requests.
_RUN_ID = re.compile("[0-9a-f]{1,32}")
#: Versions of the packages that rendered the first prompts; informative, never compared.
LIBRARIES = "libraries"
#: Key of `Identity.reading`: the time that the chat template gets; absent if it reads no clock.
NOW = "now"
#: Stored rows to render again for comparison when a data set is continued.
NUM_COMPARED = 8
CLOCK_ADVICE = (
    "\nThe chat template writes the time. For a data set whose dataset.json has no `now`, name the "
    "date of its first run: --now 2026-01-31"
)
#: Most files that a message names.
MAX_NAMES = 4


@dataclass(kw_only=True)
class RunState:
    """The rows that earlier sessions settled, and the counters of this one."""

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
                run_id=_run_id(identity) or secrets.token_hex(4),
                settled=settled,
                attempts=store.attempts(),
                suspects=store.suspects(),
                counters=counters,
                is_new=not identity,
            )

        state = await owner.call(read)
        counters.rows.total = num_rows
        counters.rows.settled_before = (
            state.settled.count(1) - counters.rows.stored - counters.rows.failed
        )
        return state

    def forget(self, ordinals: Sequence[int]) -> None:
        """These rows need work again."""
        known = [ordinal for ordinal in ordinals if ordinal < len(self.settled)]
        for ordinal in known:
            self.settled[ordinal] = 0
        self.counters.rows.settled_before -= len(known)

    def settle(self, ordinal: int) -> None:
        """This row needs no more work."""
        self.settled[ordinal] = 1

    def is_settled(self, ordinal: int) -> bool:
        """Whether the row needs no more work; so does none that the input does not have."""
        return ordinal >= len(self.settled) or bool(self.settled[ordinal])

    @property
    def is_finished(self) -> bool:
        return not self.is_new and self.counters.rows.settled == self.counters.rows.total


def _run_id(identity: Mapping[str, Any]) -> str | None:
    """The id of the run that began a data set. Raises CorruptData."""
    run_id = identity.get(RUN_ID)
    if run_id is None or (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)):
        return run_id
    raise CorruptData(f"{RUN_ID} is {quoted(run_id)}, must be hexadecimal digits")


async def with_frozen_clock(owner: StoreOwner, options: RunOptions, state: RunState) -> RunOptions:
    """`options` with the time that the data set's template got before, unless one is set."""
    if state.is_new or options.input.reading.template.now is not None:
        return options
    moment = (await begun_with_identity(owner)).reading.get(NOW)
    if moment is None:
        return options
    reading = options.input.reading
    template = replace(reading.template, now=parse_moment(str(moment)))
    reading = replace(reading, template=template)
    return replace(options, input=replace(options.input, reading=reading))


async def begin_or_continue(
    owner: StoreOwner,
    out: Path,
    identity: Identity,
    files: Sequence[InputFile],
    state: RunState,
    pool: RendererPool,
    *,
    has_work: bool,
) -> Identity:
    """The data set's identity, as recorded in the manifest. Raises ConfigMismatch.

    `has_work`: rows are left to send, so the prompts must still be the same.
    """
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
        document = {
            **identity.to_document(),
            RUN_ID: state.run_id,
            "version": __version__,
            LIBRARIES: library_versions(),
        }
        await owner.call(lambda store: store.begin(document, sources))
        return identity
    begun_with = await begun_with_identity(owner)
    goes_on_with = begun_with
    if NOW in identity.reading and NOW not in begun_with.reading:
        # An older version began the data set and recorded no time: freeze it from now on.
        reading = {**begun_with.reading, NOW: identity.reading[NOW]}
        goes_on_with = replace(begun_with, reading=reading)
    identity.require_same(goes_on_with, out=out)
    if not has_work:
        return begun_with
    await _require_same_prompts(owner, out, files, pool)
    if goes_on_with != begun_with:
        await owner.call(lambda store: store.amend("reading", dict(goes_on_with.reading)))
    return goes_on_with


async def _require_same_prompts(
    owner: StoreOwner, out: Path, files: Sequence[InputFile], pool: RendererPool
) -> None:
    """Raise ConfigMismatch if stored rows give other prompts when they are rendered again.

    This detects a change of anything that prompts depend on but the identity does not name, and
    costs a few rows. Planned rows are compared one by one when they are read again.
    """
    stored = {
        row.ordinal: row.prompt for row in await owner.call(lambda s: s.first_stored(NUM_COMPARED))
    }
    if not stored:
        return

    def read() -> list[Prompt | BadRow]:
        return list(
            prompts_of(files, pool, skip=lambda ordinal: ordinal not in stored, most=len(stored))
        )

    for item in await asyncio.to_thread(read):
        before = stored[item.ordinal]
        if isinstance(item, Prompt) and Alteration.TRUNCATED in before.alterations:
            item = item.cut(before.num_tokens)
        if isinstance(item, Prompt) and item.key == before.key:
            continue
        now = f"{item.num_tokens} tokens" if isinstance(item, Prompt) else item.reason
        libraries = (await owner.call(Store.identity)).get(LIBRARIES)
        raise ConfigMismatch(
            f"{out}: {item.origin}: row {item.ordinal} gives another prompt than the "
            f"one that is stored: {before.num_tokens} tokens then, {now} now. {PROMPT_CHANGED}"
            + _other_versions(libraries)
            + (CLOCK_ADVICE if pool.load().now else "")
        )


def _other_versions(before: object) -> str:
    if not isinstance(before, dict):  # absent in a data set of an older version
        return ""
    now = library_versions()
    return "".join(
        f"\n  {name}: begun with {before[name]}, now {now.get(name, 'absent')}"
        for name in before
        if before[name] != now.get(name)
    )


async def begun_with_identity(owner: StoreOwner) -> Identity:
    """What the data set is of, by the manifest. Raises ConfigMismatch when that is unreadable."""
    return Identity.from_document(await owner.call(lambda store: store.identity()))


async def require_same_inputs(
    owner: StoreOwner, options: RunOptions, files: Sequence[InputFile]
) -> None:
    """Raise ConfigMismatch for other prompts than the manifest's; this needs no server."""
    begun_with = await begun_with_identity(owner)
    # Only the chat template, which comes with the server, shows whether the time matters.
    clock = {NOW: begun_with.reading[NOW]} if NOW in begun_with.reading else {}
    now = replace(
        begun_with,
        inputs=tuple(file.digest for file in files),
        reading={**options.input.document, **clock},
    )
    other_inputs = None
    if now.inputs != begun_with.inputs:
        other_inputs = difference_of(await owner.call(Store.sources), files)
    now.require_same(begun_with, out=options.output.directory, other_inputs=other_inputs)


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

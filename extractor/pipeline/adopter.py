"""Stores dumps that an earlier session asked for and did not live to store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from extractor.core.admission import Admission
from extractor.core.locations import DumpRoot
from extractor.core.rids import rid_prefix
from extractor.dispatch.prompt_task import PromptTasks
from extractor.dumps.adoption import Adoptable, find_adoptable, whole
from extractor.dumps.collector import remove_dumps_of_the_dead
from extractor.dumps.discovery import scan_writers
from extractor.dumps.dump_reader import DumpPiece, Rank, disown
from extractor.intake.prompt_stream import in_thread
from extractor.pipeline.open_data_set import OpenDataSet
from prompts.stream import read_prompts
from prompts.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Adopter:
    """Runs before the collectors, which remove every dump that nobody waits for."""

    data_set: OpenDataSet
    tasks: PromptTasks
    dump_root: DumpRoot
    report: Callable[[str], None]

    async def run(self, admission: Admission, ranks: Sequence[Rank]) -> None:
        """Store the whole dumps of unsettled rows, and remove other dumps of dead servers.

        `ranks`: the writers that are up.
        """
        state = self.data_set.state
        ranks = [*ranks, *scan_writers(self.dump_root).dead]
        if state.is_new:
            await asyncio.to_thread(disown, ranks)
        adoptable = await asyncio.to_thread(
            find_adoptable,
            ranks,
            run_id=state.run_id,
            layout=self.data_set.identity.layout,
            is_fit=self.data_set.provenance.is_fit,
            is_wanted=lambda ordinal: not state.is_settled(ordinal),
        )
        if adoptable:
            num_before = state.counters.rows.stored
            await self._adopt_all(admission, adoptable)
            num_adopted = state.counters.rows.stored - num_before
            self.report(f"{num_adopted} prompts had their dumps from an earlier session")
        remove_dumps_of_the_dead(self.dump_root, rid_prefix=rid_prefix(state.run_id), known=ranks)

    async def _adopt_all(self, admission: Admission, adoptable: Adoptable) -> None:
        rows = read_prompts(
            self.data_set.files,
            self.data_set.renderer,
            skip=lambda ordinal: ordinal not in adoptable,
        )
        num_left = len(adoptable)
        async with asyncio.TaskGroup() as work:
            async for row in in_thread(rows):
                judged = admission.judge(row)
                if isinstance(judged, Prompt):
                    pieces = whole(adoptable[row.ordinal], judged.num_tokens)
                    if pieces is not None:
                        await self.tasks.start(
                            work,
                            judged,
                            row,
                            settle=partial(self._adopt, judged, pieces),
                        )
                num_left -= 1
                if not num_left or self.tasks.stop.is_set():
                    return

    async def _adopt(self, prompt: Prompt, pieces: Sequence[DumpPiece]) -> None:
        state = self.data_set.state
        attempts = state.attempts.get(prompt.ordinal, 0)
        failure = await self.tasks.movers.store(prompt, pieces, attempts=attempts)
        if failure is None:
            state.settle(prompt.ordinal)

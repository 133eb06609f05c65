"""A data set that this process writes: its parts, open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from extractor.core.identity import Identity
from extractor.dispatch.provenance import Provenance
from extractor.pipeline.resume import RunState
from extractor.shards.recovery import Reconciled
from manifest.writer_thread import StoreOwner
from prompts.inputs import InputFile
from prompts.render import Renderer
from prompts.types import BadRow, Prompt


@dataclass(frozen=True, kw_only=True)
class OpenDataSet:
    """What is stored, and what earlier sessions left to do."""

    identity: Identity
    provenance: Provenance
    owner: StoreOwner
    state: RunState
    left: Reconciled


@dataclass(frozen=True, kw_only=True)
class Intake:
    """The input files, and what makes prompts of their rows."""

    files: Sequence[InputFile]
    renderer: Renderer

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {file.path: number for number, file in enumerate(self.files)}

    def source_of(self, row: Prompt | BadRow) -> int:
        """The number of the file that the row is from."""
        return self._numbers[row.origin.source]

"""A data set that this process writes: its parts, open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extractor.dispatch.provenance import Provenance
from extractor.pipeline.resume import RunState
from extractor.shards.recovery import Reconciled
from extractor.shards.writer import ShardSettings
from manifest.writer_thread import StoreOwner
from prompts.inputs import InputFile
from prompts.pool import RendererPool


@dataclass(frozen=True, kw_only=True)
class OpenDataSet:
    """What is stored, what earlier sessions left to do, and what makes prompts of the input."""

    settings: ShardSettings
    provenance: Provenance
    owner: StoreOwner
    state: RunState
    left: Reconciled
    files: Sequence[InputFile]
    pool: RendererPool

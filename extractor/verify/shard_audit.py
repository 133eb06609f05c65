"""Checks one shard file against the manifest: its size, its header, and every sample in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import numpy as np
import xxhash

from extractor.core.checks import check_finite
from extractor.core.errors import CorruptData
from extractor.core.humanize import counted
from extractor.core.identity import Identity
from extractor.shards.format import (
    MAX_ROOM_BYTES,
    SampleTensor,
    decode_shard_header,
    sample_tensors,
    shard_digest,
    shard_metadata,
    tensor_name,
)
from extractor.system.files import blocks, read_into
from extractor.verify.findings import Audit, FindingKind, Progress
from manifest.decoding import Damage, shown
from manifest.records import Shard, StoredRow
from prompts.types import prompt_key


class ShardAuditor:
    """Checks the shard open at `descriptor`; holds its header and one sample's ids in memory."""

    def __init__(
        self,
        found: Audit,
        shard: Shard,
        identity: Identity,
        descriptor: int,
        *,
        block: memoryview,
        progress: Progress,
    ) -> None:
        self._audit = found
        self._shard = shard
        self._identity = identity
        self._layout = identity.layout
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._block = block
        self._progress = progress
        self._header: dict[str, dict[str, object]] | None = None  # entries without a sample so far

    def run(self, records: Iterable[StoredRow | Damage], *, skip: Collection[int]) -> None:
        """Check the header and every sample.

        `records`: the shard's samples in file order. `skip`: ordinals of damaged rows that are
        reported already.
        """
        before = self._audit.findings.counts.total()
        beginning = self._check_beginning() if self._shard.is_sealed else b""
        digests: list[str] = []
        end: int | None = self._shard.data_start
        is_whole = True
        for row in records:
            self._progress(1)
            if isinstance(row, Damage) or row.ordinal in skip:
                is_whole, end = False, None
                self._audit.findings.damaged_shards.add(self._shard.number)
                self._forget(row.ordinal)
                continue
            sample, tensors = row.sample, sample_tensors(row.prompt.num_tokens, self._layout)
            self._check_entries(row, tensors)
            if end is not None and sample.offset != end:
                self._find(
                    FindingKind.SAMPLE_OVERLAP,
                    f"begins at byte {sample.offset}, the one before ends at {end}",
                    row=row,
                )
            end = sample.end
            self._check_sample(row, tensors)
            digests.append(sample.digest)
        if self._header:
            names = ", ".join(map(shown, sorted(self._header)[:5]))
            self._find(
                FindingKind.SHARD_HEADER, f"{counted(len(self._header), 'unknown tensor')}: {names}"
            )
        # Once another check has found damage, a wrong digest adds nothing.
        if self._shard.is_sealed and is_whole and self._audit.findings.counts.total() == before:
            self._check_digest(beginning, digests)

    def _find(self, kind: FindingKind, detail: str, *, row: StoredRow | None = None) -> None:
        self._audit.findings.find(kind, detail, row=row.ordinal if row else None, shard=self._shard)

    # --- the beginning -----------------------------------------------------------------------

    def _check_beginning(self) -> bytes:
        """Check size and header; return the header's bytes, including its reserved space."""
        if self._size != self._shard.size_bytes:
            self._find(
                FindingKind.SHARD_SIZE, f"{self._size} bytes, must be {self._shard.size_bytes}"
            )
        data = bytearray(min(self._shard.data_start, self._size, MAX_ROOM_BYTES))
        read_into(self._descriptor, memoryview(data), 0)
        beginning = bytes(data)
        try:
            header = decode_shard_header(beginning)
        except CorruptData as error:
            self._find(FindingKind.SHARD_HEADER, str(error))
            return beginning
        if header.pop("__metadata__", None) != shard_metadata(self._identity):
            self._find(FindingKind.SHARD_HEADER, "its metadata differs from what the manifest says")
        self._header = header
        return beginning

    def _check_entries(self, row: StoredRow, tensors: Iterable[SampleTensor]) -> None:
        if self._header is None:
            return
        for tensor in tensors:
            name = tensor_name(row.ordinal, tensor.name)
            expected = tensor.entry(row.sample.offset - self._shard.data_start)
            if (stated := self._header.pop(name, None)) != expected:
                self._find(
                    FindingKind.SHARD_HEADER,
                    f"{name} is stated as {shown(stated)}, must be {expected}",
                    row=row,
                )

    def _forget(self, ordinal: int | None) -> None:
        if self._header is not None and ordinal is not None:
            for tensor in sample_tensors(1, self._layout):
                self._header.pop(tensor_name(ordinal, tensor.name), None)

    def _check_digest(self, beginning: bytes, digests: Iterable[str]) -> None:
        digest = shard_digest(xxhash.xxh3_128(beginning), digests)
        if digest != self._shard.digest:
            self._find(
                FindingKind.SHARD_DIGEST,
                f"header and samples have digest {digest}, sealed was {shown(self._shard.digest)}",
            )

    # --- samples -----------------------------------------------------------------------------

    def _check_sample(self, row: StoredRow, tensors: Iterable[SampleTensor]) -> None:
        sample, num_tokens = row.sample, row.prompt.num_tokens
        offset, size_bytes = sample.offset, sample.size_bytes
        spans = {tensor.name: tensor for tensor in tensors}
        end = max(tensor.end for tensor in spans.values())
        if not num_tokens or size_bytes != end or offset + end > self._size:
            self._find(
                FindingKind.SAMPLE_SIZE,
                f"{size_bytes} bytes at {offset} of {self._size}; {num_tokens} tokens take {end}",
                row=row,
            )
            return
        self._audit.samples_checked += 1
        tokens_begin = spans["input_ids"].begin
        tokens = bytearray(end - tokens_begin)
        digest = xxhash.xxh3_128()
        if not self._audit.is_fast:
            for name in self._layout.state_names:
                begin, stop = offset + spans[name].begin, offset + spans[name].end
                for block, at in blocks(self._descriptor, begin, stop, self._block):
                    digest.update(block)
                    failure = check_finite(block, at=at, name=name, start=0, layout=self._layout)
                    if failure is not None:
                        self._find(FindingKind.SAMPLE_NONFINITE, failure.detail, row=row)
        read_into(self._descriptor, memoryview(tokens), offset + tokens_begin)
        self._check_tokens(row, tokens)
        if not self._audit.is_fast:
            self._audit.bytes_checked += size_bytes
            digest.update(tokens)
            if digest.hexdigest() != sample.digest:
                self._find(
                    FindingKind.SAMPLE_DIGEST,
                    f"its bytes have digest {digest.hexdigest()}, stored were {sample.digest}",
                    row=row,
                )

    def _check_tokens(self, row: StoredRow, tokens: bytearray) -> None:
        ids, mask = np.frombuffer(tokens, dtype="<i4").reshape(2, -1)
        is_mask = bool(((mask == 0) | (mask == 1)).all())
        problem = None
        if not is_mask or prompt_key(ids, mask) != row.prompt.key:
            problem = "ids and mask are not those of the prompt"
        elif (ids < 0).any() or (ids >= self._identity.model.vocab_size).any():
            problem = f"ids outside the vocabulary of {self._identity.model.vocab_size}"
        elif (trained := int(mask.sum())) != row.prompt.num_trained:
            problem = (
                f"its mask trains {trained} tokens, the manifest says {row.prompt.num_trained}"
            )
        if problem is not None:
            self._find(FindingKind.SAMPLE_TOKENS, problem, row=row)

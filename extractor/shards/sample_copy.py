"""Copies a sample from its dumps to its place in a shard in one pass: read, hash, check, write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import xxhash

from extractor.core.checks import check_finite
from extractor.dumps.dump_piece import SampleFault, check_tokens, opened, still_whole
from extractor.dumps.dump_reader import DumpPiece
from extractor.system.direct_io import AppendFile
from extractor.system.files import read_into
from prompts.types import Prompt
from server_patch.dump_format import StateLayout

#: Read, hashed and checked at a time: small enough to stay in a core's cache.
BLOCK_BYTES = 1 << 20


def append_sample(
    file: AppendFile, prompt: Prompt, pieces: Sequence[DumpPiece], *, layout: StateLayout
) -> str:
    """Append the sample to `file`; its digest, xxh3-128 in hex.

    `pieces` are in order of start and tile the prompt. Raises SampleFault when token ids differ, a
    value is not finite, or a dump vanished, and then the file is as before; OSError when it cannot
    be written.
    """
    begin = file.position
    digest = xxhash.xxh3_128()
    try:
        with ExitStack() as stack:
            sources = [(piece, stack.enter_context(opened(piece))) for piece in pieces]
            for piece, source in sources:
                check_tokens(source, prompt, piece)
            for name in layout.state_names:
                for piece, source in sources:
                    span = piece.handle.dump.tensors[name]
                    with still_whole(piece):
                        for block, at in appended(file, source, span.begin, span.end):
                            failure = check_finite(
                                block, at=at, name=name, start=piece.start, layout=layout
                            )
                            if failure is not None:
                                raise SampleFault(failure)
                            digest.update(block)
    except SampleFault:
        file.rewind(begin)
        raise
    tail = token_bytes(prompt)
    digest.update(tail)
    file.write(tail)
    return str(digest.hexdigest())


def appended(
    file: AppendFile, source: int | bytes, begin: int, end: int
) -> Iterator[tuple[memoryview, int]]:
    """Append bytes [begin, end) of `source`, part by part; each part, to be looked at while it is
    in the core's cache, and its distance from `begin`. Raises EOFError when the source ends first.
    """
    at = begin
    while at < end:
        block = file.room(min(BLOCK_BYTES, end - at))
        read_into(source, block, at)
        yield block, at - begin
        file.advance(len(block))
        at += len(block)


def token_bytes(prompt: Prompt) -> bytes:
    """A sample's last two tensors as they lie in a shard: `input_ids` and `loss_mask`, int32."""
    ids = prompt.input_ids.astype("<i4", copy=False).tobytes()
    return ids + prompt.loss_mask.astype("<i4").tobytes()

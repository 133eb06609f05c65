"""Edge: one pass from a sample's dumps to its place in a shard: read, hash, check, write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import xxhash

from extractor.core.checks import check_finite, check_ids
from extractor.core.config import Layout
from extractor.dispatch.retry import Failure
from extractor.dumps.dump_reader import DumpPiece
from extractor.system.direct_io import AppendFile
from extractor.system.files import read_into
from manifest.states import Reason
from prompts.types import Prompt
from server_patch.dump_format import DumpFormatError, open_dump

#: Read, hashed and checked at a time: small enough to stay in a core's cache.
BLOCK_BYTES = 1 << 20


class SampleFault(Exception):
    """The dumps of a sample are not what was promised; nothing of it was kept."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def append_sample(
    file: AppendFile, prompt: Prompt, pieces: Sequence[DumpPiece], *, layout: Layout
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
            opened = [(piece, stack.enter_context(_opened(piece))) for piece in pieces]
            for piece, source in opened:
                _check_ids(prompt, piece, source)
            for name in layout.state_names:
                for piece, source in opened:
                    span = piece.handle.dump.tensors[name]
                    with _still_whole(piece):
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


def check_tokens(prompt: Prompt, piece: DumpPiece) -> None:
    """Raise SampleFault when a piece does not hold the tokens that were sent, or vanished."""
    with _opened(piece) as source:
        _check_ids(prompt, piece, source)


def tensor_bytes(piece: DumpPiece, name: str) -> bytes:
    """All bytes of one tensor of a piece's dump.

    Raises SampleFault when the dump has vanished or is truncated.
    """
    span = piece.handle.dump.tensors[name]
    data = bytearray(span.size_bytes)
    with _opened(piece) as source, _still_whole(piece):
        read_into(source, memoryview(data), span.begin)
    return bytes(data)


def _check_ids(prompt: Prompt, piece: DumpPiece, source: int | bytes) -> None:
    span = piece.handle.dump.tensors["input_ids"]
    data = bytearray(span.size_bytes)
    with _still_whole(piece):
        read_into(source, memoryview(data), span.begin)
    failure = check_ids(
        prompt.input_ids, np.frombuffer(data, dtype=np.dtype("<i4")), start=piece.start
    )
    if failure is not None:
        raise SampleFault(failure)


def token_bytes(prompt: Prompt) -> bytes:
    """A sample's last two tensors as they lie in a shard: `input_ids` and `loss_mask`, int32."""
    ids = prompt.input_ids.astype("<i4", copy=False).tobytes()
    return ids + prompt.loss_mask.astype("<i4").tobytes()


@contextmanager
def _still_whole(piece: DumpPiece) -> Iterator[None]:
    """Its size was right when it was collected: an early end means that somebody cut it since."""
    try:
        yield
    except EOFError as error:
        raise SampleFault(
            Failure(reason=Reason.DUMP_CORRUPT, detail=f"{piece.handle.path}: {error}")
        ) from error


class _opened:
    """Opens a piece's dump for reading, unless it was read whole; a vanished one is the sample's
    fault, not a crash."""

    def __init__(self, piece: DumpPiece) -> None:
        self._piece = piece
        self._descriptor = -1

    def __enter__(self) -> int | bytes:
        if self._piece.handle.content is not None:
            return self._piece.handle.content
        path = self._piece.handle.path
        try:
            self._descriptor = open_dump(path)
        except DumpFormatError as error:
            raise SampleFault(Failure(reason=Reason.DUMP_CORRUPT, detail=str(error))) from error
        except FileNotFoundError as error:
            raise SampleFault(
                Failure(
                    reason=Reason.DUMP_MISSING,
                    detail=f"{path} vanished before it was copied (systemd's RemoveIPC, or "
                    "somebody cleaned up)",
                )
            ) from error
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

"""Reads and checks the tensors of one dump piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from extractor.core.checks import check_ids
from extractor.core.failure import Failure
from extractor.dumps.dump_reader import DumpPiece
from extractor.system.files import read_into
from manifest.states import Reason
from prompts.types import Prompt
from server_patch.dump_format import DumpFormatError, open_dump


class SampleFault(Exception):
    """The dumps of a sample are not what was promised; nothing of it was kept."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


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

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
from server_patch.directory import UnsafeFile


class SampleFault(Exception):
    """The dumps of a sample are wrong; nothing of it was kept."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def check_tokens(source: int | bytes, prompt: Prompt, piece: DumpPiece) -> None:
    """Raise SampleFault when a piece that is `opened` does not hold the tokens that were sent."""
    found = np.frombuffer(read_tensor(source, piece, "input_ids"), dtype=np.dtype("<i4"))
    failure = check_ids(prompt.input_ids, found, start=piece.start)
    if failure is not None:
        raise SampleFault(failure)


def read_tensor(source: int | bytes, piece: DumpPiece, name: str) -> bytearray:
    """All bytes of one tensor of a piece that is `opened`. Raises SampleFault if it is cut off."""
    span = piece.handle.dump.tensors[name]
    data = bytearray(span.size_bytes)
    with still_whole(piece):
        read_into(source, memoryview(data), span.begin)
    return data


@contextmanager
def still_whole(piece: DumpPiece) -> Iterator[None]:
    """Raise SampleFault for an early end: the size was right when the piece was collected."""
    try:
        yield
    except EOFError as error:
        raise SampleFault(
            Failure(reason=Reason.DUMP_CORRUPT, detail=f"{piece.handle.path}: {error}")
        ) from error


@contextmanager
def opened(piece: DumpPiece) -> Iterator[int | bytes]:
    """The source to read a piece's dump from: its content, if it was read whole, or a descriptor.

    Raises SampleFault for a dump that has vanished.
    """
    if piece.handle.content is not None:
        yield piece.handle.content
        return
    file = piece.handle
    try:
        descriptor, _ = file.directory.open_file(file.name)
    except UnsafeFile as error:
        raise SampleFault(Failure(reason=Reason.DUMP_CORRUPT, detail=str(error))) from error
    except FileNotFoundError as error:
        raise SampleFault(
            Failure(
                reason=Reason.DUMP_MISSING,
                detail=f"{file.path} vanished before it was copied (systemd's RemoveIPC, or "
                "somebody cleaned up)",
            )
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)

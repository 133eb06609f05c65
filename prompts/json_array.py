"""Splits a JSON array into the bytes of its elements without parsing them.

Each element is later parsed like a line of JSONL: an error within it fails that row only, numbers
keep their digits, and an overlong element is skipped in constant memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from prompts import token_bound

_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_QUOTE, _COMMA = b'",'
#: Change of the nesting depth by each byte value.
_STEPS: Final = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_IS_STRUCTURE: Final = _STEPS != 0
_IS_STRUCTURE[_COMMA] = True


class ArrayFault(Exception):
    """The array cannot be read further; the message states the problem and the fix."""


def array_elements(stream: BinaryIO, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the JSON of each element, or `OVERSIZED`; the stream must begin with the array.

    Raises `ArrayFault` if the array is truncated, lacks an element, or is followed by other data.
    """
    scanner = _Scanner()
    element = _Element()
    num_elements = 0
    while chunk := scanner.whole(stream.read(chunk_bytes)):
        start = 0
        for position, is_end in scanner.borders(chunk):
            if not scanner.is_begun:
                scanner.is_begun = True  # this is the array's opening bracket
                if chunk[:position].strip():
                    raise ArrayFault("there is other data before it: remove it")
                start = position + 1
                continue
            element.add(chunk[start:position])
            start = position + 1
            data = element.take()
            if data is None:
                if num_elements or not is_end:
                    raise ArrayFault("an element is missing: remove the comma")
            else:
                num_elements += 1
                yield data
            if is_end:
                _require_end(chunk[position:], stream, chunk_bytes)
                return
        element.add(chunk[start:])
    raise ArrayFault("it is truncated: copy the file again")


def _require_end(rest: bytes, stream: BinaryIO, chunk_bytes: int) -> None:
    if not rest.startswith(b"]"):
        raise ArrayFault("there is an unmatched closing bracket: remove it")
    rest = rest[1:]
    while not rest.strip():
        if not (rest := stream.read(chunk_bytes)):
            return
    raise ArrayFault(
        "there is other data after it: remove it, or give one JSON object on each line; "
        "rows of lists are not supported"
    )


class _Element:
    """Collects the bytes of one element from one or more chunks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def add(self, part: bytes) -> None:
        if not self._size_bytes:
            part = part.lstrip()
        self._size_bytes += len(part)
        if self._size_bytes > token_bound.MAX_ROW_BYTES:
            self._parts.clear()
        else:
            self._parts.append(part)

    def take(self) -> bytes | None:
        """Return the element and reset; None if it is only white space."""
        size_bytes, data = self._size_bytes, b"".join(self._parts).rstrip()
        self._parts, self._size_bytes = [], 0
        if size_bytes > token_bound.MAX_ROW_BYTES:
            return token_bound.OVERSIZED
        return data or None


class _Scanner:
    """Finds the array's commas and its end, chunk by chunk."""

    def __init__(self) -> None:
        self.is_begun = False
        self._depth = 0
        self._is_in_string = False
        self._held = b""

    def whole(self, data: bytes) -> bytes:
        """Make `data` a chunk that does not end within an escape; the next chunk gets the rest.

        Empty only at the end of the stream.
        """
        data, self._held = self._held + data, b""
        if len(data) > 1 and (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._held = data[:-1], b"\\"
        return data

    def borders(self, chunk: bytes) -> list[tuple[int, bool]]:
        """Positions where the array begins or an element ends, and whether the array ends there."""
        plain = _ESCAPE.sub(b"__", chunk) if b"\\" in chunk else chunk
        values: npt.NDArray[Any] = np.frombuffer(plain, dtype=np.uint8)
        quotes = np.flatnonzero(values == _QUOTE)
        places = np.flatnonzero(_IS_STRUCTURE[values])
        in_string = (np.searchsorted(quotes, places) + self._is_in_string) % 2 == 1
        places = places[~in_string]
        found = values[places]
        depths = self._depth + np.cumsum(_STEPS[found])
        self._is_in_string = (len(quotes) + self._is_in_string) % 2 == 1
        is_border = ((found == _COMMA) & (depths == 1)) | (depths == 0)
        if not self.is_begun:
            is_border[:1] = True
        if len(depths):
            self._depth = int(depths[-1])
        return list(zip(places[is_border].tolist(), (depths[is_border] == 0).tolist(), strict=True))

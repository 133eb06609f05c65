"""Makes the hostile files beside it: `python tests/hostile/make.py`.

Each is small, and kept, so that what is refused today is refused tomorrow. `REASONS` says why.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROWS, WIDTH = 3, 8
TENSORS = {"aux": ("BF16", [ROWS, 24], 144), "last": ("BF16", [ROWS, WIDTH], 48),
           "input_ids": ("I32", [ROWS], 12)}  # fmt: skip

#: File -> words of the reason for which a dump reader refuses it.
REASONS = {
    "empty": "too short for a header",
    "seven-bytes": "too short for a header",
    "claims-100-MB": "header claims 100000000 bytes, at most",
    "claims-2-to-the-63": "header claims 9223372036854775808 bytes, at most",
    "claims-more-than-there-is": "file ends after",
    "deep-json": "unreadable dump header",
    "not-utf8": "unreadable dump header",
    "array": "unreadable dump header",
    "no-metadata": "unreadable dump header",
    "digits-bomb": "unreadable dump header",
    "many-rows": "tensor 'aux' is stated as",
    "negative-rows": "rows must be >= 1",
    "negative-start": "start must be >= 0",
    "overlapping": "tensor 'last' is stated as",
    "out-of-range": "tensor 'input_ids' is stated as",
    "negative-offset": "tensor 'aux' is stated as",
    "hole": "tensor 'last' is stated as",
    "reversed": "tensor 'last' is stated as",
    "missing-tensor": "tensor 'last' is stated as None",
    "extra-tensor": "unexpected tensors ['payload']",
    "object-dtype": "dtype",
    "wrong-shape": "tensor 'aux' is stated as",
    "trailing-bytes": "its header describes",
    "cut-data": "its header describes",
    "pickle": "header claims",
}


def document() -> dict[str, Any]:
    """The header of a good dump."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format_version": "1", "rid": "xtr-run-session-0-1", "start": "0", "rows": str(ROWS),
            "boundaries": "1,2,3", "hidden_size": str(WIDTH), "dtype": "BF16",
            "last_kind": "post", "boot_id": "boot", "rank": "0", "counter": "7",
        }
    }  # fmt: skip
    begin = 0
    for name, (dtype, shape, size) in TENSORS.items():
        offsets = [begin, begin + size]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        begin += size
    return entries


def encoded(header: bytes, *, data: bytes = bytes(204), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    entries = document()
    change(entries)
    return encoded(json.dumps(entries).encode())


def offsets(name: str, begin: int, end: int) -> bytes:
    return changed(lambda d: d[name].update(data_offsets=[begin, end]))


def metadata(name: str, value: str) -> bytes:
    return changed(lambda d: d["__metadata__"].update({name: value}))


def files() -> dict[str, bytes]:
    good = encoded(json.dumps(document()).encode())
    return {
        "empty": b"",
        "seven-bytes": bytes(7),
        "claims-100-MB": encoded(b"{}", length=100_000_000),
        "claims-2-to-the-63": encoded(b"{}", length=1 << 63),
        "claims-more-than-there-is": encoded(b"{}", length=4000),
        "deep-json": encoded(b'{"a":' * 9000),
        "not-utf8": encoded(b'{"\xff\xfe": 1}'),
        "array": encoded(b"[1, 2, 3]"),
        "no-metadata": changed(lambda d: d.pop("__metadata__")),
        "digits-bomb": metadata("rows", "9" * 5000),
        "many-rows": metadata("rows", str(10**18)),
        "negative-rows": metadata("rows", "-3"),
        "negative-start": metadata("start", "-1"),
        "overlapping": offsets("last", 96, 144),
        "out-of-range": offsets("input_ids", 192, 1 << 40),
        "negative-offset": offsets("aux", -144, 0),
        "hole": offsets("last", 148, 196),
        "reversed": offsets("last", 192, 144),
        "missing-tensor": changed(lambda d: d.pop("last")),
        "extra-tensor": changed(
            lambda d: d.update(payload={"dtype": "I32", "shape": [0], "data_offsets": [204, 204]})
        ),
        "object-dtype": metadata("dtype", "O"),
        "wrong-shape": changed(lambda d: d["aux"].update(shape=[24, ROWS])),
        "trailing-bytes": good + b"\x00",
        "cut-data": good[:-1],
        # What `pickle.loads` would run: a reader of safetensors sees a length that is none.
        "pickle": b"\x80\x04\x95cposix\nsystem\n(S'true'\ntR.",
    }


def main() -> None:
    assert set(files()) == set(REASONS)
    for name, data in files().items():
        (HERE / f"{name}.safetensors").write_bytes(data)
    sys.stdout.write(f"{len(REASONS)} files in {HERE}\n")


if __name__ == "__main__":
    main()

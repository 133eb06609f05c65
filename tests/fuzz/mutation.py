"""Makes invalid inputs from valid ones, from a seed. Pure, except `put`."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Kinds of entries that `put` can make where a file belongs.
KINDS = (
    "pipe", "directory", "link", "dangling", "loop", "other", "empty", "zeros", "deep", "large",
)  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """JSON text that `json.dumps` would not write."""

    text: str


class Key(str):
    """An object's key that may stand beside an equal one."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


#: Values that a careless reader does not expect.
ODD: Sequence[object] = (
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e308"), Raw("1e400"), Raw("-0")),
    *(-1, 0, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 1.5),
    *(Raw("9" * 5000), Raw("[" * 50_000), Raw("[" * 900 + "]" * 900), Raw('{"a":' * 900)),
    *(True, False, None, "", "x", "x" * 20_000, "NaN", "-1", "1e9", "9" * 5000, "१२", "1_000"),
    *("\0", "\x1b]0;title\x07\x1b[2J", "\u202e\u2066", Raw('"\\ud800"'), "a\nb", "\u2028"),
    *("../../etc/passwd", "/dev/zero", "/proc/self/mem", "..", "/"),
    *([], {}, [[]], [None], [1, "x", None], {"a": {}}, {"": None}, [{}] * 200, [0] * 2000),
)

#: Numbers for fields of binary formats.
ODD_WORDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutated_json(data: bytes, chance: random.Random) -> bytes:
    """A JSON document with one to three changes in its structure or values."""
    root: list[Any] = [json.loads(data)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(root, chance)
    return as_json(root[0])


def _change(root: list[Any], chance: random.Random) -> None:
    places = list(_places(root))
    container, key = chance.choice(places)
    value = container[key]
    (change,) = chance.choices(
        ["odd", "delete", "rename", "twice", "wrap", "other", "bit"], [60, 12, 5, 8, 5, 5, 5]
    )
    if change == "delete" and container is not root:
        del container[key]
    elif change == "rename" and isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    elif change == "twice" and isinstance(container, dict):
        container[Key(key)] = odd_value(chance)
    elif change == "wrap":
        container[key] = chance.choice(([value], {"value": value}, str(value)))
    elif change == "other":
        where, other = chance.choice(places)
        container[key] = json.loads(json.dumps(where[other], default=str))
    elif change == "bit" and isinstance(value, int):
        container[key] = value ^ (1 << chance.randrange(70))
    else:
        container[key] = odd_value(chance)


def odd_value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(ODD))


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value: its container and its key or index."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        yield container, key
        if isinstance(value, dict | list):
            yield from _places(value)


def as_json(value: object) -> bytes:
    return "".join(_parts(value)).encode()


def _parts(value: object) -> Iterator[str]:
    match value:
        case Raw(text):
            yield text
        case dict():
            yield "{"
            for number, (key, inner) in enumerate(value.items()):
                yield f"{', ' if number else ''}{json.dumps(str(key))}: "
                yield from _parts(inner)
            yield "}"
        case list() | tuple():
            yield "["
            for number, inner in enumerate(value):
                yield ", " if number else ""
                yield from _parts(inner)
            yield "]"
        case _:
            yield json.dumps(value)


def mutated_bytes(data: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Bytes with one to four changes. `others`: sound files, to splice parts of."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage(changed, chance, others)
    return bytes(changed)


def _damage(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 4, 16, 256, 4096)))
    (change,) = chance.choices(
        ["bit", "byte", "cut", "remove", "insert", "repeat", "zeros", "word", "splice"],
        [30, 15, 10, 8, 8, 5, 4, 15, 5],
    )
    match change:
        case "bit" if at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        case "byte" if at < len(data):
            data[at] = chance.choice((0, 1, 0x22, 0x5C, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        case "cut":
            del data[at:]
        case "remove":
            del data[at:end]
        case "insert":
            data[at:at] = chance.randbytes(end - at + 1)
        case "repeat":
            data[at:at] = data[at:end] * chance.choice((1, 2, 50))
        case "zeros":
            data[at:end] = bytes(end - at)
        case "word":
            form = chance.choice(("<Q", ">Q", "<I", ">I", "<H", ">H"))
            size = struct.calcsize(form)
            # Fields of binary formats are usually aligned.
            at = at // size * size if chance.random() < 0.7 else at
            word = chance.choice(ODD_WORDS) % (1 << 8 * size)
            data[at : at + size] = struct.pack(form, word)
        case "splice" if others:
            other = chance.choice(others)
            begin = chance.randrange(len(other) + 1)
            data[at:] = other[begin:]


def put(path: Path, kind: str) -> None:
    """Replace what is at `path` by an entry of another kind. See `KINDS`."""
    remove(path)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "other":
            path.symlink_to("/proc/version")
        case "file":
            path.write_bytes(b"x")
        case "empty":
            path.write_bytes(b"")
        case "zeros":
            path.write_bytes(bytes(8192))
        case "deep":
            path.write_bytes(b"[" * (1 << 20))
        case "large":
            with path.open("wb") as file:
                file.truncate(6 << 30)  # sparse: takes no disk space


def remove(path: Path) -> None:
    """Remove whatever is at `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

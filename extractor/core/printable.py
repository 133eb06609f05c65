"""Escapes what would control a terminal, in text that is shown to a person. Pure.

Text from a server, a file name or a prompt may hold sequences that move the cursor, set the
clipboard or reverse the direction of writing. Only a few modules print, and they pass everything
through here (`tests/unit/test_house.py` lists them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

#: C0 but for tab and newline, DEL, C1, controls of direction, line and paragraph separators, and
#: what is left of bytes that are not UTF-8.
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text with each control character as its escape; all else as it is.

    >>> print(printable("\x1b[2Jred\u202e, \N{SNOWMAN}\x9b"))
    \x1b[2Jred\u202e, ☃\x9b
    """
    return _CONTROLS.sub(_escape, text)


def printable_json(document: Mapping[str, Any], *, is_indented: bool = False) -> str:
    r"""A JSON object whose strings have these characters as escapes; a program reads the same.

    What JSON does not know is written as text.

    >>> print(printable_json({"url": "\x9b2J\udcff"}))
    {"url":"\u009b2J\udcff"}
    """
    option = orjson.OPT_INDENT_2 if is_indented else 0
    try:
        text = orjson.dumps(document, default=str, option=option).decode()
    except TypeError:  # it refuses what is left of bytes that are not UTF-8
        layout = {"indent": 2} if is_indented else {"separators": (",", ":")}
        text = json.dumps(document, default=str, ensure_ascii=False, **layout)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"

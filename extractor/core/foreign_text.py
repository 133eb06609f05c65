r"""Cleans text that another program wrote, before it is part of a message or stored. Pure.

A server may repeat what it was sent: the API key in a dump of headers, a password in an address.
That must not end up in a manifest, a log or on a terminal. It does not help against a server that
disguises the key on purpose.

>>> told("401:\n Authorization: Bearer sk-1234, see http://me:pw@host/", secrets=["sk-1234"])
'401: Authorization: Bearer [removed], see http://[removed]@host/'
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

MAX_TOLD_CHARS: Final = 200
REMOVED: Final = "[removed]"
#: Shorter ones are not secret, and stand in every other word.
_MIN_SECRET_CHARS: Final = 4
_USER_INFO: Final = re.compile(r"(?<=://)[^\s/@\"'<>]{1,512}@")
_BEARER: Final = re.compile(r"\b(bearer|basic)([\s:=]+)[\w.~+/=-]{8,4096}", re.IGNORECASE)


def told(text: str, *, secrets: Iterable[str] = (), max_chars: int = MAX_TOLD_CHARS) -> str:
    """One line of at most `max_chars`, without secrets."""
    return shortened(" ".join(without_secrets(text, secrets=secrets).split()), max_chars)


def without_secrets(text: str, *, secrets: Iterable[str] = ()) -> str:
    """The text without `secrets`, users and passwords in addresses, and authorization headers."""
    for secret in secrets:
        if len(secret) >= _MIN_SECRET_CHARS:
            escaped = (json.dumps(secret)[1:-1], repr(secret)[1:-1])
            for spelling in {secret, *escaped, quote(secret), quote(secret, "")}:
                text = text.replace(spelling, REMOVED)
    text = _USER_INFO.sub(f"{REMOVED}@", text)
    return _BEARER.sub(rf"\1\2{REMOVED}", text)


def shortened(text: str, max_chars: int) -> str:
    """At most `max_chars` of the text.

    >>> shortened("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."

"""The turns of one conversation, whatever their keys are called. Pure.

No turn is ever dropped or cut: one that cannot be understood rejects its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prompts.types import RowError, RowReason

Role = Literal["system", "user", "assistant", "tool"]

ROLE_KEYS: Final = ("role", "from")
CONTENT_KEYS: Final = ("content", "value", "text")
#: Columns beside the turn list that hold a system prompt.
SYSTEM_FIELDS: Final = ("system", "system_prompt")

ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}

#: Keys that change what the model sees and that are not rendered yet. Going on without them would
#: change the prompt silently, so where one has a value the row is rejected.
UNSUPPORTED_TURN_KEYS: Final = (
    *("tool_calls", "function_call"),
    *("reasoning_content", "reasoning", "thinking", "thinking_content"),
)
UNSUPPORTED_ROW_FIELDS: Final = (
    *("tools", "functions"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
#: How data sets write "nothing" where a column must have a value.
NOTHING: Final[tuple[object, ...]] = (None, "", [], {}, "[]", "{}", "null")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn; `content` is never blank, and is kept to the last space."""

    role: Role
    content: str


def read_turns(row: Mapping[str, Any], values: Sequence[object]) -> tuple[Turn, ...]:
    """The turns in `values`, the non-empty turn list of `row`, with the row's system prompt.

    After system turns, if any, the first turn is the user's. Raises `RowError`.
    """
    for field in UNSUPPORTED_ROW_FIELDS:
        if row.get(field) not in NOTHING:
            raise RowError(RowReason.UNSUPPORTED_FIELD, f"{field} cannot be rendered yet")
    turns = tuple(_turn(index, value) for index, value in enumerate(values))
    _check_order(turns)
    return _with_system(row, turns)


def _turn(index: int, value: object) -> Turn:
    if not isinstance(value, dict):
        detail = f"turn {index} is a {type(value).__name__}, not an object"
        raise RowError(RowReason.BAD_CONTENT, detail)
    role = _role(index, value)
    for key in UNSUPPORTED_TURN_KEYS:
        if value.get(key) not in NOTHING:
            detail = f"turn {index} ({role}): {key} cannot be rendered yet"
            raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
    return Turn(role=role, content=_content(f"turn {index} ({role})", value))


def _role(index: int, value: Mapping[str, Any]) -> Role:
    names = [value[key] for key in ROLE_KEYS if value.get(key) is not None]
    if not names:
        raise RowError(RowReason.UNKNOWN_ROLE, f"turn {index} has no {' or '.join(ROLE_KEYS)}")
    roles: set[Role] = set()
    for name in names:
        if not isinstance(name, str) or name not in ROLES:
            detail = f"turn {index}: role {repr(name)[:40]} is none of {', '.join(ROLES)}"
            raise RowError(RowReason.UNKNOWN_ROLE, detail)
        roles.add(ROLES[name])
    if len(roles) > 1:
        detail = f"turn {index}: {' and '.join(ROLE_KEYS)} disagree"
        raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return roles.pop()


def _content(where: str, value: Mapping[str, Any]) -> str:
    found = {key: value[key] for key in CONTENT_KEYS if value.get(key) is not None}
    if not found:
        detail = f"{where} has no {' or '.join(CONTENT_KEYS)}"
        raise RowError(RowReason.BAD_CONTENT, detail)
    texts = {_plain_text(f"{where}: {key}", content) for key, content in found.items()}
    if len(texts) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{where}: {' and '.join(found)} disagree")
    text = texts.pop()
    if not text.strip():
        raise RowError(RowReason.BAD_CONTENT, f"{where} is empty")
    return text


def _plain_text(where: str, content: object) -> str:
    """A string as it is; a list of text parts joined with nothing in between."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(RowReason.BAD_CONTENT, f"{where} is a {type(content).__name__}, not text")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            detail = f"{where}: part {index} is {repr(kind)[:40]}, only text can be rendered"
            raise RowError(RowReason.BAD_CONTENT, detail)
        texts.append(text)
    return "".join(texts)


def _check_order(turns: Sequence[Turn]) -> None:
    """Further order rules (strict alternation, one system turn) are the chat template's to make."""
    for index, turn in enumerate(turns):
        if turn.role == "user":
            return
        if turn.role != "system":
            detail = f"turn {index} ({turn.role}) comes before the first user turn"
            raise RowError(RowReason.BAD_ORDER, detail)
    raise RowError(RowReason.BAD_ORDER, "there is no user turn")


def _with_system(row: Mapping[str, Any], turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    texts = set()
    for field in SYSTEM_FIELDS:
        if (value := row.get(field)) is None:
            continue
        if not isinstance(value, str):
            detail = f"{field} is a {type(value).__name__}, not text"
            raise RowError(RowReason.BAD_CONTENT, detail)
        if value.strip():
            texts.add(value)
    if not texts:
        return turns
    if own := {turn.content for turn in turns if turn.role == "system"}:
        if not texts <= own:
            detail = f"{' or '.join(SYSTEM_FIELDS)} differs from the system turn"
            raise RowError(RowReason.CONFLICTING_FIELDS, detail)
        return turns
    if len(texts) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{' and '.join(SYSTEM_FIELDS)} disagree")
    return (Turn(role="system", content=texts.pop()), *turns)

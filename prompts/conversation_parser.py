"""The turns of one conversation, whatever their keys are called. Pure.

No turn is dropped or cut unless the options ask for it: one that cannot be understood rejects its
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prompts.reading_options import Leading, ReadingOptions
from prompts.tools import NOTHING, ToolCall, read_tool_calls, read_tools
from prompts.training import is_trained
from prompts.types import Alteration, RowError, RowReason, kind_of

Role = Literal["system", "developer", "user", "assistant", "tool"]

ROLE_KEYS: Final = ("role", "from")
CONTENT_KEYS: Final = ("content", "value", "text")
#: Where a turn keeps what the assistant thought before it spoke.
REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking", "thinking_content")
#: Columns beside the turn list that hold a system prompt.
SYSTEM_FIELDS: Final = ("system", "system_prompt")

ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}

#: Fields that change what the model sees and that cannot be rendered. Going on without them would
#: change the prompt silently, so where one has a value the row is rejected.
UNSUPPORTED_FIELDS: Final = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """One turn; `content` is kept to the last space, and blank only beside tool calls."""

    role: Role
    content: str
    reasoning: str | None = None  # of an assistant turn; never blank
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant turn
    name: str | None = None  # of a tool, mostly
    tool_call_id: str | None = None  # of a tool turn: the call that it answers
    is_excluded: bool = False  # of an assistant turn: the row excludes it from training

    @property
    def is_trained(self) -> bool:
        """Whether it is an assistant turn that the row does not exclude from training."""
        return self.role == "assistant" and not self.is_excluded


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Turns to be rendered with the chat template; a user turn comes before any assistant turn."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[Any, ...] = ()  # definitions, as the template takes them
    alterations: frozenset[Alteration] = frozenset()


def read_turns(
    row: Mapping[str, Any], values: Sequence[object], options: ReadingOptions
) -> Conversation:
    """The turns in `values`, the non-empty turn list of `row`, with the row's system prompt.

    After system turns, if any, the first turn is the user's. Raises `RowError`.
    """
    _refuse_media("", row)
    alterations: set[Alteration] = set()
    turns = tuple(_turn(index, value, options, alterations) for index, value in enumerate(values))
    tools = read_tools(row, alterations)
    turns = _ordered(turns, options, alterations)
    return Conversation(
        turns=_with_system(row, turns), tools=tools, alterations=frozenset(alterations)
    )


def _refuse_media(prefix: str, value: Mapping[str, Any]) -> None:
    for field in UNSUPPORTED_FIELDS:
        if value.get(field) not in NOTHING:
            raise RowError(RowReason.UNSUPPORTED_FIELD, f"{prefix}{field} cannot be rendered")


def _turn(
    index: int, value: object, options: ReadingOptions, alterations: set[Alteration]
) -> ChatTurn:
    if not isinstance(value, dict):
        detail = f"turn {index} is {kind_of(value)}, not an object"
        raise RowError(RowReason.BAD_CONTENT, detail)
    role = _role(index, value, options, alterations)
    where = f"turn {index} ({role})"
    _refuse_media(f"{where}: ", value)
    tool_calls = read_tool_calls(where, value, alterations)
    reasoning = _reasoning(where, value)
    if role != "assistant" and (tool_calls or reasoning is not None):
        key = "tool calls" if tool_calls else "reasoning"
        raise RowError(RowReason.UNSUPPORTED_FIELD, f"{where}: {key} outside an assistant turn")
    trained = is_trained(where, role, value, options.ignored_columns)
    _check_parts(where, value, role, trained, options)
    return ChatTurn(
        role=role,
        content=_content(where, value, may_be_empty=bool(tool_calls)),
        reasoning=reasoning,
        tool_calls=tool_calls,
        name=_optional_text(value, "name"),
        tool_call_id=_optional_text(value, "tool_call_id"),
        is_excluded=role == "assistant" and not trained,
    )


def _check_parts(
    where: str, turn: Mapping[str, Any], role: Role, trained: bool, options: ReadingOptions
) -> None:
    """Raises `RowError` if a trained turn has a content part that is not to be trained."""
    for key in CONTENT_KEYS:
        for index, part in enumerate(parts if isinstance(parts := turn.get(key), list) else ()):
            place = f"{where}: {key}: part {index}"
            if (
                isinstance(part, dict)
                and is_trained(place, role, part, options.ignored_columns) < trained
            ):
                detail = f"{place} is not to be trained, and only whole turns can be left out"
                raise RowError(RowReason.UNSUPPORTED_FIELD, detail)


def _role(
    index: int, value: Mapping[str, Any], options: ReadingOptions, alterations: set[Alteration]
) -> Role:
    names = [value[key] for key in ROLE_KEYS if value.get(key) is not None]
    if not names:
        raise RowError(RowReason.UNKNOWN_ROLE, f"turn {index} has no {' or '.join(ROLE_KEYS)}")
    roles: set[Role] = set()
    for name in names:
        mapped = options.role_map.get(name) if isinstance(name, str) else None
        if mapped is not None:
            roles.add(mapped)  # type: ignore[arg-type]  # checked where the options are made
            alterations.add(Alteration.ROLE_MAPPED)
            continue
        if not isinstance(name, str) or name not in ROLES:
            shown = repr(name)[:40]
            known = ", ".join(ROLES)
            detail = f"turn {index}: role {shown} is none of {known}; --role-map gives it one"
            raise RowError(RowReason.UNKNOWN_ROLE, detail)
        roles.add(ROLES[name])
    if len(roles) > 1:
        detail = f"turn {index}: {' and '.join(ROLE_KEYS)} disagree"
        raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return roles.pop()


def _content(where: str, value: Mapping[str, Any], *, may_be_empty: bool) -> str:
    found = {key: value[key] for key in CONTENT_KEYS if value.get(key) is not None}
    if not found:
        if may_be_empty:
            return ""
        detail = f"{where} has no {' or '.join(CONTENT_KEYS)}"
        raise RowError(RowReason.BAD_CONTENT, detail)
    text = _agreed(where, found)
    if not text.strip() and not may_be_empty:
        raise RowError(RowReason.BAD_CONTENT, f"{where} is empty")
    return text


def _reasoning(where: str, value: Mapping[str, Any]) -> str | None:
    found = {key: value[key] for key in REASONING_KEYS if value.get(key) not in NOTHING}
    text = _agreed(where, found)
    return text if text.strip() else None


def _agreed(where: str, found: Mapping[str, Any]) -> str:
    """The one text of fields that mean the same; empty without any."""
    texts = {_plain_text(f"{where}: {key}", content) for key, content in found.items()}
    if len(texts) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{where}: {' and '.join(found)} disagree")
    return texts.pop() if texts else ""


def _optional_text(value: Mapping[str, Any], key: str) -> str | None:
    text = value.get(key)
    return text if isinstance(text, str) and text else None


def _plain_text(where: str, content: object) -> str:
    """A string as it is; a list of text parts joined with nothing in between."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(RowReason.BAD_CONTENT, f"{where} is {kind_of(content)}, not text")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            detail = f"{where}: part {index} is {repr(kind)[:40]}, only text can be rendered"
            raise RowError(RowReason.BAD_CONTENT, detail)
        texts.append(text)
    return "".join(texts)


def _ordered(
    turns: tuple[ChatTurn, ...], options: ReadingOptions, alterations: set[Alteration]
) -> tuple[ChatTurn, ...]:
    """Further order rules (strict alternation, one system turn) are the chat template's to make."""
    kept: list[ChatTurn] = []
    for index, turn in enumerate(turns):
        if turn.role == "user":
            return (*kept, *turns[index:])
        if turn.role in ("system", "developer"):
            kept.append(turn)
        elif options.leading is Leading.DROP:
            alterations.add(Alteration.LEADING_DROPPED)
        else:
            detail = (
                f"turn {index} ({turn.role}) comes before the first user turn; "
                "--leading drop leaves it out"
            )
            raise RowError(RowReason.BAD_ORDER, detail)
    raise RowError(RowReason.BAD_ORDER, "there is no user turn")


def _with_system(row: Mapping[str, Any], turns: tuple[ChatTurn, ...]) -> tuple[ChatTurn, ...]:
    texts = set()
    for field in SYSTEM_FIELDS:
        if (value := row.get(field)) is None:
            continue
        if not isinstance(value, str):
            detail = f"{field} is {kind_of(value)}, not text"
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
    return (ChatTurn(role="system", content=texts.pop()), *turns)

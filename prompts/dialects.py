"""One row's bytes -> the conversation, text or ids in it. Pure; no tokenizer.

`DIALECTS` is the order of attack: the first function that recognises the row wins. A new dialect is
one more function there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson

from prompts.turns import Turn, read_turns
from prompts.types import RowError, RowReason

Row = Mapping[str, Any]

#: Fields that may hold the row's own id. It is only a label; nothing is found by it.
LABEL_FIELDS: Final = ("id", "conversation_id", "uuid", "prompt_id")
MAX_ID: Final = 2**31 - 1
#: How much of a row's own field names, roles and types a message may repeat.
MAX_NAMES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Turns to be rendered with the chat template; a system turn or a user turn comes first."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text that is already rendered: to be tokenised as it is."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ids:
    """Tokens to be sent as they are."""

    input_ids: npt.NDArray[np.int32]  # [N], N >= 1, none negative
    loss_mask: npt.NDArray[np.uint8] | None  # [N], 0 or 1; None where the row has none


Item = Conversation | Text | Ids
#: Returns None where the row is not of this dialect, raises `RowError` where it is, but broken.
Dialect = Callable[[Row], Item | None]


def decode_row(data: bytes) -> Row:
    """Parses one line. Raises `RowError` (bad_json, not_an_object)."""
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise RowError(RowReason.BAD_JSON, f"{exc.msg} at character {exc.pos}") from exc
    if not isinstance(row, dict):
        raise RowError(RowReason.NOT_AN_OBJECT, f"the line is a {type(row).__name__}")
    return row


def label_of(row: Row) -> str | None:
    """The row's own id as JSON text: the first of `LABEL_FIELDS` that is a string or number."""
    for field in LABEL_FIELDS:
        if isinstance(value := row.get(field), str | int | float):
            return orjson.dumps(value).decode()
    return None


def read_item(row: Row) -> Item:
    """What the row holds, by the first dialect that recognises it. Raises `RowError`."""
    for dialect in DIALECTS:
        if (item := dialect(row)) is not None:
            return item
    for field in TURN_FIELDS:
        if row.get(field) == []:
            raise RowError(RowReason.BAD_ORDER, f"{field} is an empty list")
    found = ", ".join(field[:40] for field in list(row)[:MAX_NAMES]) or "no fields"
    expected = ", ".join(("input_ids", *TURN_FIELDS, "text"))
    raise RowError(RowReason.UNKNOWN_SHAPE, f"none of {expected} is there; found: {found}")


def _ids(row: Row) -> Ids | None:
    if (ids := row.get("input_ids")) is None:
        return None
    if not isinstance(ids, list) or not _all_of(ids, {int}):
        raise RowError(RowReason.BAD_INPUT_IDS, "input_ids is not a flat list of integers")
    if not ids:
        raise RowError(RowReason.EMPTY_PROMPT, "input_ids is empty")
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise RowError(RowReason.BAD_INPUT_IDS, f"input_ids has an id outside [0, {MAX_ID}]")
    return Ids(input_ids=np.array(ids, dtype=np.int32), loss_mask=_loss_mask(row, len(ids)))


def _loss_mask(row: Row, num_tokens: int) -> npt.NDArray[np.uint8] | None:
    if (mask := row.get("loss_mask")) is None:
        return None
    if not isinstance(mask, list) or not _all_of(mask, {int, bool}) or not {0, 1}.issuperset(mask):
        raise RowError(RowReason.BAD_LOSS_MASK, "loss_mask is not a flat list of 0 and 1")
    if len(mask) != num_tokens:
        detail = f"loss_mask has {len(mask)} entries, input_ids has {num_tokens}"
        raise RowError(RowReason.BAD_LOSS_MASK, detail)
    return np.array(mask, dtype=np.uint8)


def _all_of(values: Iterable[object], types: set[type]) -> bool:
    # By exact type: `True` is an int to isinstance, and numpy would make an id of it.
    return types.issuperset(map(type, values))


def _messages(row: Row) -> Conversation | None:
    return _conversation(row, "messages")


def _conversations(row: Row) -> Conversation | None:
    return _conversation(row, "conversations")


def _conversation(row: Row, field: str) -> Conversation | None:
    values = row.get(field)
    if values is None or values == []:
        return None
    if not isinstance(values, list):
        detail = f"{field} is a {type(values).__name__}, not a list of turns"
        raise RowError(RowReason.BAD_CONTENT, detail)
    return Conversation(turns=read_turns(row, values))


def _text(row: Row) -> Text | None:
    if (text := row.get("text")) is None:
        return None
    if not isinstance(text, str):
        raise RowError(RowReason.BAD_CONTENT, f"text is a {type(text).__name__}, not a string")
    if not text:
        raise RowError(RowReason.EMPTY_PROMPT, "text is empty")
    return Text(text=text)


TURN_FIELDS: Final[tuple[Literal["messages", "conversations"], ...]] = ("messages", "conversations")
DIALECTS: Final[tuple[Dialect, ...]] = (_ids, _messages, _conversations, _text)

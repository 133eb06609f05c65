"""One row's bytes -> the conversation, text or ids in it. Pure; no tokenizer.

`DIALECTS` is the order of attack: the first function that recognises the row wins, unless the
options name the columns to read. A new dialect is one more function there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from prompts.options import DEFAULTS, ReadingOptions
from prompts.turns import Conversation, read_turns
from prompts.types import RowError, RowReason

Row = Mapping[str, Any]

#: Fields that may hold the row's own id. It is only a label; nothing is found by it.
LABEL_FIELDS: Final = ("id", "conversation_id", "uuid", "prompt_id")
MAX_ID: Final = 2**31 - 1
#: How much of a row's own field names, roles and types a message may repeat.
MAX_NAMES: Final = 8


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
Dialect = Callable[[Row, ReadingOptions], Item | None]


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


def read_item(row: Row, options: ReadingOptions = DEFAULTS) -> Item:
    """What the row holds: of the fields that were asked for, or of the first dialect that knows it.

    Raises `RowError`.
    """
    if options.fields:
        return _asked(row, options)
    for dialect in DIALECTS:
        if (item := dialect(row, options)) is not None:
            return item
    for field in TURN_FIELDS:
        if row.get(field) in ([], "[]"):
            raise RowError(RowReason.BAD_ORDER, f"{field} is an empty list")
    found = ", ".join(field[:40] for field in list(row)[:MAX_NAMES]) or "no fields"
    expected = ", ".join(("input_ids", *TURN_FIELDS, "data", "instruction", "prompt", "text"))
    raise RowError(RowReason.UNKNOWN_SHAPE, f"none of {expected} is there; found: {found}")


def count_parts(data: bytes, options: ReadingOptions) -> int:
    """How many prompts a row expands to: one for each assistant turn, one where there is none.

    A row that gives no prompt counts as one, which then fails with its reason.
    """
    try:
        item = read_item(decode_row(data), options)
    except RowError:
        return 1
    if not isinstance(item, Conversation):
        return 1
    return max(1, sum(turn.role == "assistant" for turn in item.turns))


def _asked(row: Row, options: ReadingOptions) -> Item:
    """The columns that `--field` names; what they hold decides how they are read."""
    values = []
    for field in options.fields:
        if row.get(field) is None:
            found = ", ".join(name[:40] for name in list(row)[:MAX_NAMES]) or "no fields"
            detail = f"--field {field}: there is no such column; found: {found}"
            raise RowError(RowReason.UNKNOWN_SHAPE, detail)
        values.append(row[field])
    if len(values) == 2:
        return _pair(row, options.fields[0], options.fields[1], options)
    (field,) = options.fields
    value = _listed(field, values[0])
    if isinstance(value, str):
        if field == "text":
            return _text(row, options) or _nothing(field)
        return _one_turn(row, field, options)
    if isinstance(value, list) and value and _all_of(value, {int}):
        return _read_ids(field, value, row)
    if isinstance(value, list) and value and _all_of(value, {str}):
        return _alternating(row, value, options)
    return _turn_list(row, field, options) or _nothing(field)


def _ids(row: Row, options: ReadingOptions) -> Ids | None:
    if (ids := row.get("input_ids")) is None:
        return None
    return _read_ids("input_ids", ids, row)


def _read_ids(field: str, ids: object, row: Row) -> Ids:
    if not isinstance(ids, list) or not _all_of(ids, {int}):
        raise RowError(RowReason.BAD_INPUT_IDS, f"{field} is not a flat list of integers")
    if not ids:
        raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise RowError(RowReason.BAD_INPUT_IDS, f"{field} has an id outside [0, {MAX_ID}]")
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


def _messages(row: Row, options: ReadingOptions) -> Conversation | None:
    return _turn_list(row, "messages", options)


def _conversations(row: Row, options: ReadingOptions) -> Conversation | None:
    return _turn_list(row, "conversations", options)


def _turn_list(row: Row, field: str, options: ReadingOptions) -> Conversation | None:
    values = _listed(field, row.get(field))
    if values is None or values == []:
        return None
    if not isinstance(values, list):
        detail = f"{field} is a {type(values).__name__}, not a list of turns"
        raise RowError(RowReason.BAD_CONTENT, detail)
    return read_turns(row, values, options)


def _data(row: Row, options: ReadingOptions) -> Conversation | None:
    """UltraChat as it was: plain strings, the user's and the assistant's in turn."""
    values = row.get("data")
    if not isinstance(values, list) or not values or not _all_of(values, {str}):
        return None
    return _alternating(row, values, options)


def _alternating(row: Row, values: list[Any], options: ReadingOptions) -> Conversation:
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(values)]
    return read_turns(row, turns, options)


def _input_output(row: Row, options: ReadingOptions) -> Conversation | None:
    """Llama-Nemotron: a list of turns and, beside it, the answer."""
    values = _listed("input", row.get("input"))
    if not isinstance(values, list) or not values:
        return None
    answer = row.get("output")
    if not isinstance(answer, str):
        detail = f"output is a {type(answer).__name__}, not text"
        raise RowError(RowReason.BAD_CONTENT, detail)
    return read_turns(row, [*values, {"role": "assistant", "content": answer}], options)


def _pairs(row: Row, options: ReadingOptions) -> Conversation | None:
    for user, assistant in PAIRS:
        if isinstance(row.get(user), str) and isinstance(row.get(assistant), str):
            return _pair(row, user, assistant, options)
    return None


def _pair(row: Row, user: str, assistant: str, options: ReadingOptions) -> Conversation:
    question = row[user]
    if isinstance(question, str):
        if any(token in question for token in FOREIGN_TOKENS):
            detail = f"{user} is rendered already, for another model: it has control tokens in it"
            raise RowError(RowReason.BAD_CONTENT, detail)
        context = row.get("input") if user == "instruction" else None
        if isinstance(context, str) and context.strip():
            question = f"{question}\n\n{context}"
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": row[assistant]},
    ]
    return read_turns(row, turns, options)


def _prompt(row: Row, options: ReadingOptions) -> Conversation | None:
    """A question without an answer, or the turns before one that stands in `completion`."""
    value = _listed("prompt", row.get("prompt"))
    if isinstance(value, list) and value:
        answer = row.get("completion")
        return read_turns(row, [*value, *(answer if isinstance(answer, list) else ())], options)
    return None if value is None or value == [] else _one_turn(row, "prompt", options)


def _one_turn(row: Row, field: str, options: ReadingOptions) -> Conversation:
    text = row[field]
    if isinstance(text, str) and not text.strip():
        raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")
    return read_turns(row, [{"role": "user", "content": text}], options)


def _text(row: Row, options: ReadingOptions) -> Text | None:
    if (text := row.get("text")) is None:
        return None
    if not isinstance(text, str):
        raise RowError(RowReason.BAD_CONTENT, f"text is a {type(text).__name__}, not a string")
    if not text.strip():
        raise RowError(RowReason.EMPTY_PROMPT, "text is empty")
    return Text(text=text)


def _nothing(field: str) -> Any:
    raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")


def _listed(field: str, value: object) -> object:
    """The value, or the list in it where a column of strings holds JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        if isinstance(parsed, list) and _all_of(parsed, {dict}):
            return parsed
    return value


TURN_FIELDS: Final = ("messages", "conversations")
#: The user's column and the assistant's, in order of attack.
PAIRS: Final = (
    *(("instruction", "output"), ("instruction", "response"), ("input", "output")),
    *(("question", "answer"), ("message_1", "message_2"), ("problem", "solution")),
    *(("prompt", "completion"), ("prompt", "response")),
)
#: Some Llama-Nemotron files hold what was sent to Llama, headers and all.
FOREIGN_TOKENS: Final = ("<|start_header_id|>",)
DIALECTS: Final[tuple[Dialect, ...]] = (
    *(_ids, _messages, _conversations, _data, _input_output, _pairs, _prompt, _text),
)

"""One row's bytes -> the conversation, text or ids in it. Pure; no tokenizer.

`DIALECTS` is the order of attack: the first function that recognises the row wins, unless the
options name the columns to read. A new dialect is one more function there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from prompts.conversation_parser import CONTENT_KEYS, ROLE_KEYS, ROLES, Conversation, read_turns
from prompts.reading_options import DEFAULTS, ReadingOptions
from prompts.token_bound import MAX_EXPANDED_BYTES, OVERSIZED, oversized, parse_json
from prompts.token_masks import COLUMNS, ID_PAIR, read_tokens
from prompts.tools import NOTHING
from prompts.training import check_columns
from prompts.types import Alteration, RowError, RowReason, is_list_of, kind_of

Row = Mapping[str, Any]

_NAN: Final = re.compile(rb"-?(?:NaN|Infinity)")

#: Fields that may hold the row's own id. It is only a label; nothing is found by it.
LABEL_FIELDS: Final = ("id", "conversation_id", "uuid", "prompt_id")
MAX_LABEL_CHARS: Final = 1000
MAX_ID: Final = 2**31 - 1
#: How much of a row's own field names, roles and types a message may repeat.
MAX_NAMES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedText:
    """Text that is already rendered: to be tokenised as it is."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ids:
    """Tokens to be sent as they are."""

    input_ids: npt.NDArray[np.int32]  # [N], N >= 1, none negative
    num_written: int  # the row's ids, padding included
    loss_mask: npt.NDArray[np.uint8] | None  # [N], 0 or 1; None where the row has none
    alterations: frozenset[Alteration] = frozenset()


Item = Conversation | RenderedText | Ids
#: Returns None where the row is not of this dialect, raises `RowError` where it is, but broken.
Dialect = Callable[[Row, ReadingOptions], Item | None]


def decode_row(data: bytes) -> Row:
    """Parses one line. Raises `RowError` (bad_json, not_an_object, row_too_large)."""
    if data == OVERSIZED:
        raise oversized()
    try:
        row = parse_json(data)
    except orjson.JSONDecodeError as exc:
        detail = f"{exc.msg} at character {exc.pos}"
        if data[: exc.pos + 1].endswith((b"N", b"I", b"-I")) or _NAN.match(data, exc.pos):
            detail = f"NaN and Infinity are not JSON (character {exc.pos}): write null or a number"
        raise RowError(RowReason.BAD_JSON, detail) from exc
    if not isinstance(row, dict):
        raise RowError(RowReason.NOT_AN_OBJECT, f"the row is {kind_of(row)}")
    return row


def label_of(row: Row) -> str | None:
    """The row's own id as JSON text: the first of `LABEL_FIELDS` that is a string or number.

    A string is cut after `MAX_LABEL_CHARS`, since the manifest stores it.
    """
    for field in LABEL_FIELDS:
        if isinstance(value := row.get(field), str) and len(value) > MAX_LABEL_CHARS:
            return orjson.dumps(f"{value[:MAX_LABEL_CHARS]}…").decode()
        if isinstance(value := row.get(field), str | int | float):
            return orjson.dumps(value).decode()
    return None


def read_item(row: Row, options: ReadingOptions = DEFAULTS) -> Item:
    """Read a row: the requested fields, or else the first dialect that recognises it.

    Raises `RowError`, also for columns about training that are not understood.
    """
    if options.ignored_columns:
        row = {name: value for name, value in row.items() if name not in options.ignored_columns}
    item = _asked(row, options) if options.fields else _recognised(row, options)
    _check_training(row, item, options)
    if isinstance(item, Conversation) and _has_value(row.get("rejected")):
        alterations = item.alterations | {Alteration.REJECTED_DROPPED}
        return replace(item, alterations=alterations)
    return item


def _check_training(row: Row, item: Item, options: ReadingOptions) -> None:
    if isinstance(item, Ids):
        read, lengths = {*COLUMNS, *options.fields}, {item.num_written}
    else:
        read = set(options.fields)
        lengths = {len(item.turns)} if isinstance(item, Conversation) else set()
    check_columns(
        row,
        read=read,
        lengths=lengths,
        is_ids=isinstance(item, Ids),
        has_mask=isinstance(item, Ids) and item.loss_mask is not None,
        ignored=options.ignored_columns,
    )


def _recognised(row: Row, options: ReadingOptions) -> Item:
    for dialect in DIALECTS:
        if (item := dialect(row, options)) is not None:
            return item
    for field in TURN_FIELDS:
        if row.get(field) in ([], "[]"):
            raise RowError(RowReason.BAD_ORDER, f"{field} is an empty list")
    raise RowError(RowReason.UNKNOWN_SHAPE, _why_unknown(row))


def _why_unknown(row: Row) -> str:
    known = ("input_ids", *ID_PAIR, *TURN_FIELDS, "data", *QUESTIONS, *ANSWERS, "text")
    if found := [field for field in known if field in row]:
        columns = ", ".join(f"{field} is {kind_of(row[field])}" for field in found[:MAX_NAMES])
        answers = " or ".join(ANSWERS)
        questions = " or ".join(QUESTIONS)
        if not any(_has_value(row[field]) for field in found):
            return f"nothing to read: {columns}"
        if set(found) <= set(ANSWERS):
            return f"an answer without its question ({questions}): {columns}"
        if set(found) <= {*QUESTIONS, *ANSWERS}:
            return f"no question and answer, both strings ({answers}): {columns}"
        return f"not of a kind that can be read: {columns}"
    names = ", ".join(field[:40] for field in list(row)[:MAX_NAMES]) or "no fields"
    return f"none of {', '.join(known)} is there; found: {names}"


def count_parts(data: bytes, options: ReadingOptions) -> int:
    """The number of prompts that a row expands to: one for each trained answer, at least one.

    An invalid row counts as one prompt, which later fails with the row's reason.
    """
    try:
        item = read_item(decode_row(data), options)
        if not isinstance(item, Conversation):
            return 1
        check_parts(item, len(data))
    except RowError:
        return 1
    return max(1, _num_parts(item))


def _num_parts(item: Conversation) -> int:
    return sum(turn.is_trained for turn in item.turns)


def check_parts(item: Conversation, size_bytes: int) -> None:
    """Raises `RowError` (row_too_large) for a row that is too large to be parsed for each part.

    `size_bytes`: the size of the row.
    """
    num_parts = _num_parts(item)
    if num_parts * size_bytes > MAX_EXPANDED_BYTES:
        detail = f"{num_parts} answers to expand in {size_bytes} bytes: split the row"
        raise RowError(RowReason.ROW_TOO_LARGE, detail)


def _asked(row: Row, options: ReadingOptions) -> Item:
    """The columns that `--field` names; what they hold decides how they are read."""
    values = []
    for field in options.fields:
        if field in row and row[field] is None:
            raise RowError(RowReason.UNKNOWN_SHAPE, f"--field {field}: the column is null")
        if field not in row:
            found = ", ".join(name[:40] for name in list(row)[:MAX_NAMES]) or "no fields"
            detail = f"--field {field}: there is no such column; found: {found}"
            raise RowError(RowReason.UNKNOWN_SHAPE, detail)
        values.append(row[field])
    if len(values) == 2:
        if all(value and is_list_of(value, int) for value in values):
            return _id_pair(row, options.fields)
        return _pair(row, options.fields[0], options.fields[1], options)
    (field,) = options.fields
    value = _listed(values[0])
    if isinstance(value, str):
        if field == "text":
            return _text(row, options) or _nothing(field)
        return _one_turn(row, field, options)
    if value and is_list_of(value, int):
        return _read_ids(field, value, row)
    if value and is_list_of(value, str):
        return _alternating(row, value, options)
    return _turn_list(row, field, options) or _nothing(field)


def _ids(row: Row, options: ReadingOptions) -> Ids | None:
    if (ids := row.get("input_ids")) is not None:
        return _read_ids("input_ids", ids, row)
    if all(isinstance(row.get(name), list) for name in ID_PAIR):
        return _id_pair(row, ID_PAIR)
    return None


def _read_ids(field: str, ids: object, row: Row) -> Ids:
    """The ids of one column, with a loss mask if the row gives prompt and completion ids, too."""
    values = _id_list(field, ids)
    found = [name for name in ID_PAIR if isinstance(row.get(name), list)]
    if len(found) == 1:
        other = next(name for name in ID_PAIR if name not in found)
        detail = f"{found[0]} without {other}; --ignore-column {found[0]} leaves it out"
        raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
    if not found:
        return _masked(row, values, [field], num_prompt=None)
    prompt, answer = (_id_list(name, row[name]) for name in ID_PAIR)
    if [*prompt, *answer] != values:
        detail = f"{' and '.join(ID_PAIR)} are not {field}; --ignore-column leaves one of them out"
        raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return _masked(row, values, [field], num_prompt=len(prompt))


def _id_pair(row: Row, names: Sequence[str]) -> Ids:
    """The ids of a prompt followed by those of its answer, from two columns."""
    prompt, answer = (_id_list(name, row[name]) for name in names)
    return _masked(row, [*prompt, *answer], names, num_prompt=len(prompt))


def _id_list(field: str, ids: object) -> list[int]:
    if not is_list_of(ids, int):
        raise RowError(RowReason.BAD_INPUT_IDS, f"{field} is not a flat list of integers")
    if not ids:
        raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise RowError(RowReason.BAD_INPUT_IDS, f"{field} has an id outside [0, {MAX_ID}]")
    return ids


def _masked(row: Row, ids: list[int], columns: Sequence[str], *, num_prompt: int | None) -> Ids:
    tokens = read_tokens(row, ids, columns=columns, num_prompt=num_prompt)
    return Ids(
        input_ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        num_written=len(ids),
        alterations=frozenset({Alteration.PADDING_CUT} if tokens.was_padded else ()),
    )


def _turns(row: Row, options: ReadingOptions) -> Conversation | None:
    """A turn list, and the answer to it that preference data keeps beside it."""
    for field in TURN_FIELDS:
        # In other data sets, a column `conversation` holds human-readable text.
        is_text = field == "conversation" and not isinstance(_listed(row.get(field)), list)
        if not is_text and (conversation := _turn_list(row, field, options)) is not None:
            break
    else:
        return None
    if _has_value(row.get("history")):
        detail = f"history stands beside {field}; --field names the one to read"
        raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    if conversation.turns[-1].role == "assistant":
        return conversation
    if _has_value(row.get("chosen")):
        _only(row, ANSWERS)
        return _pair(row, field, "chosen", options)
    return _answered_within(row, conversation)


def _turn_list(row: Row, field: str, options: ReadingOptions) -> Conversation | None:
    values = _listed(row.get(field))
    if values is None or values == []:
        return None
    if not isinstance(values, list):
        detail = f"{field} is {kind_of(values)}, not a list of turns"
        raise RowError(RowReason.BAD_CONTENT, detail)
    return read_turns(row, values, options)


def _data(row: Row, options: ReadingOptions) -> Conversation | None:
    """UltraChat as it was: plain strings, the user's and the assistant's in turn."""
    values = row.get("data")
    if not values or not is_list_of(values, str):
        return None
    return _answered_within(row, _alternating(row, values, options))


def _alternating(row: Row, values: list[Any], options: ReadingOptions) -> Conversation:
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(values)]
    return read_turns(row, turns, options)


def _answered(row: Row, options: ReadingOptions) -> Conversation | None:
    """A question (or the turns up to it) and its answer, in columns of their own."""
    question, answer = _only(row, QUESTIONS), _only(row, ANSWERS)
    if question is None or answer is None:
        return None
    return _pair(row, question, answer, options)


def _pair(row: Row, user: str, assistant: str, options: ReadingOptions) -> Conversation:
    asked = _asked_turns(row, user)
    answer = _listed(row[assistant])
    if isinstance(answer, str):
        return read_turns(row, [*asked, {"role": "assistant", "content": answer}], options)
    if isinstance(answer, dict):
        return read_turns(row, [*asked, answer], options)
    if not answer or not is_list_of(answer, dict):
        detail = f"{assistant} is {kind_of(answer)}, not a string or a list of turns"
        raise RowError(RowReason.BAD_CONTENT, detail)
    if _role_of(answer[0]) in ASSISTANT_NAMES:
        return read_turns(row, [*asked, *answer], options)
    # Some preference data writes the whole conversation down, the question included.
    is_text = isinstance(row[user], str) and len(asked) == 1
    if answer[: len(asked)] != asked and not (
        is_text and any(_says(turn, asked[0]["content"]) for turn in answer)
    ):
        detail = f"{assistant} begins with other turns than {user}; --field names the one to read"
        raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return read_turns(row, answer, options)


def _asked_turns(row: Row, user: str) -> list[Any]:
    """What comes before the answer: the history, and the question with what it is about."""
    history = _history(row)
    question = _listed(row[user])
    if isinstance(question, list) and question:
        return [*history, *question]
    if not isinstance(question, str):
        detail = f"{user} is {kind_of(question)}, not a string or a list of turns"
        raise RowError(RowReason.BAD_CONTENT, detail)
    if any(token in question for token in FOREIGN_TOKENS):
        detail = f"{user} is rendered already, for another model: it has control tokens in it"
        raise RowError(RowReason.BAD_CONTENT, detail)
    if context := _context(row, user):
        question = f"{question}\n\n{context}"
    return [*history, {"role": "user", "content": question}]


def _context(row: Row, user: str) -> str | None:
    if user == "instruction":
        field = _only(row, CONTEXTS)
        context = None if field is None else row[field]
        if context is None or isinstance(context, str):
            return context if context and context.strip() else None
        detail = f"{field} is {kind_of(context)}, not a string"
        raise RowError(RowReason.BAD_CONTENT, detail)
    if user != "context" and _has_value(row.get("context")):
        detail = (
            f"context would be left out: write it and {user} into one column, that --field names"
        )
        raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
    return None


def _history(row: Row) -> list[Any]:
    """LLaMA-Factory: earlier questions and their answers, as pairs; or turns."""
    if not _has_value(value := row.get("history")):
        return []
    if is_list_of(value, dict):
        return value
    turns = []
    for pair in value if isinstance(value, list) else [value]:
        if not is_list_of(pair, str) or len(pair) != 2:
            detail = "history is no list of [question, answer], both of them strings"
            raise RowError(RowReason.BAD_CONTENT, detail)
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _only(row: Row, fields: Iterable[str]) -> str | None:
    """The first of the fields that has a value; of those that have none, one that is a string.

    Raises `RowError` (conflicting_fields) where another of them has another value.
    """
    found = [field for field in fields if _has_value(row.get(field))]
    if "target" in found and isinstance(row["target"], bool | int | float):
        found.remove("target")  # a class or a score, not text
    if "instruction" in found:
        found = [field for field in found if field != "input"]  # what the instruction is about
    if "answer" in found and not {"solution", "generated_solution"}.isdisjoint(found):
        found.remove("answer")  # its last line only, as mathematics has it
    if not found:
        return next((field for field in fields if isinstance(row.get(field), str)), None)
    first = found[0]
    for other in found[1:]:
        if row[other] != row[first]:
            detail = f"{first} and {other} disagree; --field names the one (or two) to read"
            raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return first


def _has_value(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in NOTHING


def _role_of(turn: object) -> object:
    if not isinstance(turn, dict):
        return None
    return next((turn[key] for key in ROLE_KEYS if turn.get(key) is not None), None)


def _says(turn: object, text: str) -> bool:
    return isinstance(turn, dict) and any(turn.get(key) == text for key in CONTENT_KEYS)


def _prompt(row: Row, options: ReadingOptions) -> Conversation | None:
    """A question without an answer, or the turns of one."""
    value = _listed(row.get("prompt"))
    if value is None or value == []:
        return None
    if isinstance(value, str) and not value.strip():
        raise RowError(RowReason.EMPTY_PROMPT, "prompt is empty")
    _only(row, QUESTIONS)
    return _answered_within(row, read_turns(row, _asked_turns(row, "prompt"), options))


def _chosen(row: Row, options: ReadingOptions) -> Conversation | None:
    """Preferences whose question stands in both answers only."""
    if not isinstance(_listed(row.get("chosen")), list):
        return None
    return _turn_list(row, "chosen", options)


def _answered_within(row: Row, conversation: Conversation) -> Conversation:
    """The conversation, of a row whose answer is in no column that goes with its turns.

    Raises `RowError` (unsupported_field) where some other column may hold it.
    """
    if conversation.turns[-1].role == "assistant":
        return conversation
    for field in (*ANSWERS, *ANSWER_LISTS):
        if _has_value(row.get(field)):
            detail = (
                f"the last turn is a question, and {field} would be left out; "
                "--field names what to read"
            )
            raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
    return conversation


def _one_turn(row: Row, field: str, options: ReadingOptions) -> Conversation:
    text = row[field]
    if isinstance(text, str) and not text.strip():
        raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")
    return read_turns(row, [{"role": "user", "content": text}], options)


def _text(row: Row, options: ReadingOptions) -> RenderedText | None:
    if (text := row.get("text")) is None:
        return None
    if not isinstance(text, str):
        raise RowError(RowReason.BAD_CONTENT, f"text is {kind_of(text)}, not a string")
    if not text.strip():
        raise RowError(RowReason.EMPTY_PROMPT, "text is empty")
    return RenderedText(text=text)


def _nothing(field: str) -> Any:
    raise RowError(RowReason.EMPTY_PROMPT, f"{field} is empty")


def _listed(value: object) -> object:
    """The value, or the list in it where a column of strings holds JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except orjson.JSONDecodeError:
            return value
        if is_list_of(parsed, dict):
            return parsed
    return value


TURN_FIELDS: Final = ("messages", "conversations", "conversation")
#: Columns that hold a question, and columns that hold an answer. Two that differ refuse the row.
QUESTIONS: Final = (
    *("instruction", "input", "question", "query", "message_1", "problem", "prompt"),
)
ANSWERS: Final = (
    *("output", "response", "answer", "message_2", "solution", "generated_solution"),
    *("completion", "target", "chosen"),
)
#: Columns of several answers to one question: none of them is the one to learn.
ANSWER_LISTS: Final = ("answers", "responses", "completions", "outputs", "solutions")
#: What an instruction is about.
CONTEXTS: Final = ("input", "context")
ASSISTANT_NAMES: Final = tuple(name for name, role in ROLES.items() if role == "assistant")
#: Some Llama-Nemotron files hold what was sent to Llama, headers and all.
FOREIGN_TOKENS: Final = ("<|start_header_id|>",)
DIALECTS: Final[tuple[Dialect, ...]] = (*(_ids, _turns, _data, _answered, _prompt, _chosen, _text),)

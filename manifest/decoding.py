"""Decodes and encodes the records of a manifest that may be damaged. Pure.

SQLite checks types when it writes, not when it reads: a flipped bit can turn a number into text.
Every value is checked here, before any other code sees it, and a row's checksum covers damage that
still looks valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson
import xxhash

from manifest.records import (
    PromptFacts,
    Row,
    ServerStart,
    Shard,
    Source,
    SourceRow,
    StoredRow,
    StoredSample,
    shard_name,
)
from manifest.states import Reason, State

MAX_INTEGER: Final = 2**63 - 1
#: The length of a shard's header, and the longest that safetensors allows.
MAX_DATA_START: Final = 8 + 100_000_000
#: Exceeds any model's context length; bounds the memory for one sample's ids.
MAX_TOKENS: Final = 1 << 25
_SHOWN_CHARACTERS: Final = 60
_WRONG_CHECKSUM: Final = "its checksum is not that of its columns"

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A record of the manifest that is not what this tool wrote."""

    table: str
    place: object  # the row's primary key, as far as it can be read
    detail: str

    @property
    def ordinal(self) -> int | None:
        """The ordinal of the input row, if the record is one and its ordinal can be read."""
        is_row = self.table == "prompts" and type(self.place) is int
        return self.place if is_row else None  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.table}, row {shown(self.place)}: {self.detail}"


#: Converts a SQLite value to the value of a record. Raises ValueError with the requirement.
Check = Callable[[object], Any]


def shown(value: object) -> str:
    """Format a value for a message, with bounded length."""
    text = repr(value[:_SHOWN_CHARACTERS] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def row_checksum(names: Iterable[str], values: Iterable[object]) -> int:
    """The checksum of a row's columns; `names` must be sorted.

    NULLs are left out, so that a new column in a later version does not change the checksums of
    existing rows. Raises TypeError for bytes.
    """
    pairs = [pair for pair in zip(names, values, strict=True) if pair[1] is not None]
    return xxhash.xxh3_64_intdigest(orjson.dumps(pairs)) >> 1


def text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("UTF-8 text")


def integer(low: int = 0, high: int = MAX_INTEGER) -> Check:
    def check(value: object) -> int:
        if isinstance(value, int) and low <= value <= high:
            return value
        limit = "" if high == MAX_INTEGER else f" and at most {high}"
        raise ValueError(f"an integer of at least {low}{limit}")

    return check


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def one_of(kind: type[State] | type[Reason]) -> Check:
    members = {member.value: member for member in kind}

    def check(value: object) -> State | Reason:
        if isinstance(value, str) and value in members:
            return members[value]
        raise ValueError(f"a known {kind.__name__.lower()}")

    return check


def as_json(value: object) -> Any:
    """The document in a text; one that can be a part of others, such as dataset.json."""
    try:
        document = orjson.loads(text(value))
        orjson.dumps([[[[[[[[document]]]]]]]])
    except (ValueError, TypeError) as error:  # TypeError: nested too deeply to be written
        raise ValueError("JSON") from error
    return document


def _json_of(kind: type) -> Check:
    def check(value: object) -> Any:
        found = as_json(value)
        if not isinstance(found, kind):
            raise ValueError(f"JSON of a {kind.__name__}")
        return found

    return check


def _facts(value: object) -> Any:
    """What a server announced: values by name, one of them its settings."""
    facts = _json_of(dict)(value)
    if not isinstance(facts.get("settings"), dict | None):
        raise ValueError("JSON whose settings are an object")
    return facts


def _real(value: object) -> float:
    if isinstance(value, float) and value >= 0:
        return value
    raise ValueError("a number of at least 0")


def _names(value: object) -> tuple[str, ...]:
    return () if value is None else tuple(filter(None, text(value).split(",")))


_number = integer()
_optional_number = optional(integer())
_optional_text = optional(text)

#: Every column of `prompts` that a checksum covers, by name.
PROMPTS: Final[Mapping[str, Check]] = {
    "alterations": _names,
    "attempts": _number,
    "detail": _optional_text,
    "digest": _optional_text,
    "key": _optional_text,
    "label": _optional_text,
    "line": _number,
    "num_deaths": _number,
    "num_pieces": optional(integer(1)),
    "num_tokens": optional(integer(0, MAX_TOKENS)),
    "num_trained": optional(integer(0, MAX_TOKENS)),
    "offset": _optional_number,
    "ordinal": _number,
    "part": _optional_number,
    "reason": optional(one_of(Reason)),
    "server": _optional_number,
    "shard": _optional_number,
    "size_bytes": _optional_number,
    "source": _number,
    "state": one_of(State),
}
PROMPT_COLUMNS: Final = tuple(PROMPTS)
_ORDINAL: Final = PROMPT_COLUMNS.index("ordinal")

SOURCES: Final[Mapping[str, Check]] = {
    "digest": text,
    "num_rows": _number,
    "number": _number,
    "path": text,
    "size_bytes": _number,
}

IDENTITY: Final[Mapping[str, Check]] = {"name": text, "value": as_json}

STARTS: Final[Mapping[str, Check]] = {
    "accepted": _json_of(list),
    "boot_id": text,
    "canary_error": optional(_real),
    "facts": _facts,
    "number": _number,
    "session": _number,
    "url": text,
    "used_at": text,
}

SHARDS: Final[Mapping[str, Check]] = {
    "number": _number,
    "data_start": integer(8, MAX_DATA_START),
    "is_sealed": integer(0, 1),
    "end_bytes": _number,
    "num_samples": _number,
    "digest": _optional_text,
}

#: Of one state and reason, so that the sum of all fits into 64 bits.
_tally = integer(0, 1 << 56)

TALLIES: Final[Mapping[str, Check]] = {
    "state": one_of(State),
    "reason": lambda value: None if value == "" else one_of(Reason)(value),
    "num_rows": _tally,
    "num_tokens": _tally,
    "size_bytes": _tally,
    "num_untrained": _tally,
}


def encode_prompt(row: Row) -> tuple[object, ...]:
    """Encode a row of `prompts`: PROMPT_COLUMNS and `checksum`."""
    origin, prompt, sample = row.origin, row.prompt, row.sample
    values = (
        prompt and (",".join(prompt.alterations) or None),
        row.attempts,
        row.detail,
        sample and sample.digest,
        prompt and prompt.key,
        origin.label,
        origin.line,
        row.num_deaths,
        sample and sample.num_pieces,
        prompt and prompt.num_tokens,
        prompt and prompt.num_trained,
        sample and sample.offset,
        origin.ordinal,
        origin.part,
        row.reason,
        sample and sample.server,
        sample and sample.shard,
        sample and sample.size_bytes,
        origin.source,
        row.state,
    )
    return (*values, row_checksum(PROMPT_COLUMNS, values))


def decode_prompt(values: Sequence[object]) -> Row | Damage:
    """Decode a row of `prompts`: PROMPT_COLUMNS and `checksum`."""
    *columns, checksum = values
    fields = decode("prompts", PROMPTS, columns, place=columns[_ORDINAL])
    if isinstance(fields, Damage):
        return fields
    state: State = fields["state"]
    problem = None
    if checksum is None and state.is_terminal:
        problem = "it has no checksum"
    elif checksum is not None and checksum != row_checksum(PROMPT_COLUMNS, columns):
        problem = _WRONG_CHECKSUM
    elif (state is State.FAILED) != (fields["reason"] is not None):
        problem = f"it is {state} with the reason {fields['reason']}"
    elif state is State.STORED:
        missing = [name for name in _OF_A_SAMPLE if fields[name] is None]
        problem = f"it is stored without {', '.join(missing)}" if missing else None
    elif (fields["key"] is None) != (fields["num_tokens"] is None):
        problem = "it has only one of key and num_tokens"
    if problem is not None:
        return Damage(table="prompts", place=fields["ordinal"], detail=problem)
    return Row(
        origin=_made_of(SourceRow, fields),
        prompt=None if fields["key"] is None else _made_of(PromptFacts, fields),
        sample=_made_of(StoredSample, fields) if state is State.STORED else None,
        state=state,
        reason=fields["reason"],
        detail=fields["detail"],
        attempts=fields["attempts"],
        num_deaths=fields["num_deaths"],
    )


def _made_of(kind: type[Part], fields: Mapping[str, Any]) -> Part:
    """A part of a row, whose fields are named as the columns are."""
    names: Sequence[str] = kind.__slots__  # type: ignore[attr-defined]
    return kind(**{name: fields[name] for name in names})


#: Columns that every stored row has.
_OF_A_SAMPLE: Final = ("shard", "offset", "size_bytes", "digest", "key", "num_tokens", "num_pieces")


def decode_stored(values: Sequence[object]) -> StoredRow | Damage:
    """Decode a row of `prompts` that must be stored: PROMPT_COLUMNS and `checksum`."""
    row = decode_prompt(values)
    if isinstance(row, Damage):
        return row
    if row.prompt is None or row.sample is None:
        detail = f"it is {row.state} and has the place of a sample"
        return Damage(table="prompts", place=row.ordinal, detail=detail)
    return StoredRow(ordinal=row.ordinal, prompt=row.prompt, sample=row.sample)


def decode_source(values: Sequence[object]) -> Source | Damage:
    """Decode a row of `sources`: SOURCES and `checksum`."""
    fields = _with_checksum("sources", SOURCES, values, key="number")
    return fields if isinstance(fields, Damage) else Source(**fields)


def decode_start(values: Sequence[object]) -> ServerStart | Damage:
    """Decode a row of `server_starts`: STARTS and `checksum`."""
    fields = _with_checksum("server_starts", STARTS, values, key="number")
    if isinstance(fields, Damage):
        return fields
    return ServerStart(**{**fields, "accepted": tuple(map(str, fields["accepted"]))})


def decode_identity(values: Sequence[object]) -> dict[str, Any] | Damage:
    """Decode a row of `identity`: `name`, `value` and `checksum`."""
    return _with_checksum("identity", IDENTITY, values, key="name")


def _with_checksum(
    table: str, checks: Mapping[str, Check], values: Sequence[object], *, key: str
) -> dict[str, Any] | Damage:
    """Decode a row that ends with its checksum; `key`: the primary key's column."""
    *columns, checksum = values
    place = columns[list(checks).index(key)]
    fields = decode(table, checks, columns, place=place)
    if isinstance(fields, dict) and checksum != row_checksum(checks, columns):
        return Damage(table=table, place=place, detail=_WRONG_CHECKSUM)
    return fields


def canary_digest(dump: bytes) -> str:
    """The xxh3-128 digest of a canary's dump, in hex."""
    return xxhash.xxh3_128_hexdigest(dump)


def decode_shard(values: Sequence[object]) -> Shard | Damage:
    """Decode a row of `shards`: SHARDS."""
    fields = decode("shards", SHARDS, values, place=values[0])
    if isinstance(fields, Damage):
        return fields
    fields["is_sealed"] = bool(fields["is_sealed"])
    fields["size_bytes"] = fields.pop("end_bytes")
    return Shard(**fields)


def shard_name_damage(number: object, name: object) -> Damage | None:
    """The Damage of a shard whose recorded name is not the one that its number gives it."""
    if isinstance(number, int) and name == (expected := shard_name(number)):
        return None
    detail = f"name is {shown(name)}"
    if isinstance(number, int):
        detail += f", must be {expected}"
    return Damage(table="shards", place=number, detail=detail)


def decode(
    table: str, checks: Mapping[str, Check], values: Sequence[object], *, place: object
) -> dict[str, Any] | Damage:
    """Check every column; return the values by name, or Damage for the first invalid one."""
    fields: dict[str, Any] = {}
    for (name, check), value in zip(checks.items(), values, strict=True):
        try:
            fields[name] = check(value)
        except ValueError as error:
            return Damage(
                table=table, place=place, detail=f"{name} is {shown(value)}, must be {error}"
            )
    return fields

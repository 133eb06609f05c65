"""What the client and its worker processes say to each other, as plain values. Pure.

A message is a tuple of strings, numbers, bytes, lists and dicts, pickled: reading one imports and
calls nothing, and works beside a user's own package that is named `prompts`.

```
client    ("load", source, options, bound, limits)   ("rows", [(part, data), …])
          ("check", template, limits)                ("decode", [ids, …])
worker    ("loaded", facts)   ("checked",)   ("rows", [result, …])   ("texts", [text, …])
          ("refused", message)       it cannot be loaded: a `TokenizerError`
          ("raised", message)        anything else; the worker process ends
```
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np

from prompts.ambient import parse_moment
from prompts.inputs import RawRow
from prompts.reading_options import (
    Leading,
    ReadingOptions,
    TemplateOptions,
    Thinking,
    Tools,
    Train,
    Training,
)
from prompts.token_bound import TokenBound
from prompts.types import Alteration, BadRow, Prompt, RowOrigin, RowReason

Message = tuple[Any, ...]
Result = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """What a chat template and a tokenizer may take, in a worker process."""

    row_s: float = 60.0  # for one row; a batch of rows must be done in the same time
    load_s: float = 300.0  # to load, and perhaps to download
    memory_bytes: int = 4 << 30  # to load, and then beyond what loading took
    max_deaths: int = 10  # of worker processes in a row, without a row that succeeds in between


DEFAULT_LIMITS: Final = CodeLimits()


@dataclass(frozen=True, kw_only=True)
class RendererFacts:
    """What the client needs to know about the tokenizer and the chat template in its workers."""

    tokenizer_digest: str  # of all that decides which tokens a text gives, or "none"
    template_digest: str  # of the chat template's text, or "none"
    now: str | None  # time that the chat template gets, in ISO 8601; None if it reads no clock


def dumps(message: Message) -> bytes:
    """A message as bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Message:
    """The message in `data`. Raises `pickle.UnpicklingError` where it names anything to import."""
    message: Message = _PlainUnpickler(io.BytesIO(data)).load()
    return message


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"not a plain value: {module_name}.{global_name}")


def load_message(
    source: str, options: ReadingOptions, bound: TokenBound, limits: CodeLimits
) -> Message:
    """Asks a worker to load a tokenizer."""
    return "load", source, _options_document(options), astuple(bound), astuple(limits)


def check_message(template: str, limits: CodeLimits) -> Message:
    """Asks a worker whether a chat template can be compiled."""
    return "check", template, astuple(limits)


def loaded_options(document: Mapping[str, Any]) -> ReadingOptions:
    """The options of a `load` message."""
    now = document["now"]
    return ReadingOptions(
        fields=tuple(document["fields"]),
        role_map=document["role_map"],
        thinking=Thinking(document["thinking"]),
        leading=Leading(document["leading"]),
        training=Training(answers=Train(document["train"]), reasoning=document["train_thinking"]),
        tools=Tools(document["tools"]),
        ignored_columns=tuple(document["ignore_column"]),
        template=TemplateOptions(
            text=document["template"],
            kwargs=document["template_kwargs"],
            now=None if now is None else parse_moment(now),
        ),
    )


def _options_document(options: ReadingOptions) -> dict[str, Any]:
    now = options.template.now
    return {
        **options.to_document(),
        # In the order given, which the document of a data set does not keep.
        "role_map": dict(options.role_map),
        "ignore_column": list(options.ignored_columns),
        "template_kwargs": dict(options.template.kwargs),
        "template": options.template.text,
        "now": None if now is None else now.isoformat(),
    }


def loaded_bound(values: Sequence[Any]) -> TokenBound:
    """The bound of a `load` message."""
    max_tokens, keeps_beginning, max_whole_chars = values
    return TokenBound(
        max_tokens=max_tokens, keeps_beginning=keeps_beginning, max_whole_chars=max_whole_chars
    )


def loaded_limits(values: Sequence[Any]) -> CodeLimits:
    """The limits of a `load` or `check` message."""
    row_s, load_s, memory_bytes, max_deaths = values
    return CodeLimits(row_s=row_s, load_s=load_s, memory_bytes=memory_bytes, max_deaths=max_deaths)


def rows_message(rows: Sequence[RawRow]) -> Message:
    """Asks a worker for the prompts of rows; what names a row stays here."""
    return "rows", [(row.origin.part, row.data) for row in rows]


def loaded_rows(values: Sequence[tuple[int | None, bytes]]) -> list[RawRow]:
    """The rows of a `rows` message, without their numbers and places."""
    return [
        RawRow(ordinal=0, origin=RowOrigin(source="", line=1, part=part), data=data)
        for part, data in values
    ]


def result_of(item: Prompt | BadRow) -> Result:
    """A row's result, without what names the row."""
    if isinstance(item, BadRow):
        return item.label, item.reason.value, item.detail
    return (
        item.label,
        item.input_ids.tobytes(),
        item.loss_mask.tobytes(),
        [alteration.value for alteration in item.alterations],
        item.has_answer,
        item.is_beginning,
    )


def item_of(row: RawRow, result: Result) -> Prompt | BadRow:
    """The result of `row`."""
    if len(result) == 3:
        label, reason, detail = result
        return BadRow(
            ordinal=row.ordinal,
            origin=row.origin,
            label=label,
            reason=RowReason(reason),
            detail=detail,
        )
    label, ids, mask, alterations, has_answer, is_beginning = result
    return Prompt(
        ordinal=row.ordinal,
        origin=row.origin,
        label=label,
        input_ids=np.frombuffer(ids, dtype=np.int32),
        loss_mask=np.frombuffer(mask, dtype=np.uint8),
        alterations=tuple(map(Alteration, alterations)),
        has_answer=has_answer,
        is_beginning=is_beginning,
    )

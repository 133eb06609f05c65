"""The values this package hands out, and its errors. Pure: no files, no tokenizer.

```
InputError       an input file cannot be used at all: the run stops before the first prompt
TokenizerError   the model's tokenizer cannot be loaded: the run stops before the first prompt
RowError         one row gives no prompt; caught inside the package and handed out as a `BadRow`
```
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt
import xxhash

#: Part of every key: a new meaning of ids or mask must give new keys.
KEY_TAG: Final = b"hidden-state-extractor prompt 1\n"


class RowReason(StrEnum):
    """Why an input row gives no prompt. Closed: every such row has exactly one of these."""

    #: The line is not JSON in UTF-8; NaN and lone surrogates are invalid, too.
    BAD_JSON = "bad_json"
    #: JSON, but not an object.
    NOT_AN_OBJECT = "not_an_object"
    #: None of the fields that could hold a prompt is there.
    UNKNOWN_SHAPE = "unknown_shape"
    #: A turn's role is missing or not in the table.
    UNKNOWN_ROLE = "unknown_role"
    #: A turn or a text is missing, empty, or not text (images too).
    BAD_CONTENT = "bad_content"
    #: No turns, no user turn first, ...
    BAD_ORDER = "bad_order"
    #: Two fields that mean the same thing disagree.
    CONFLICTING_FIELDS = "conflicting_fields"
    #: A field that changes the prompt or its mask in an unsupported way: images and other media,
    #: several documents in one row, training flags that are not understood.
    UNSUPPORTED_FIELD = "unsupported_field"
    #: Tool calls or tool definitions that cannot be understood; arguments that are no JSON object.
    BAD_TOOL_CALL = "bad_tool_call"
    #: `input_ids` is not a flat list of integers in [0, 2**31), or does not match its
    #: `attention_mask` or `position_ids`.
    BAD_INPUT_IDS = "bad_input_ids"
    #: A mask is not a list of 0 and 1 with one entry for each id, an entry of `labels` is neither
    #: -100 nor the id, or a weight of a turn is neither 0 nor 1.
    BAD_LOSS_MASK = "bad_loss_mask"
    #: No token comes out.
    EMPTY_PROMPT = "empty_prompt"
    #: The chat template refused the row, lost a turn of it, or there is no template.
    RENDER_FAILED = "render_failed"
    #: The assistant turns cannot be located in the rendering with certainty.
    MASK_FAILED = "mask_failed"
    #: The row exceeds a limit of `prompts.token_bound`, or has too many turns to mask.
    ROW_TOO_LARGE = "row_too_large"
    #: Far more tokens than the limit; the row was not tokenised to its end.
    TOO_LONG = "too_long"
    #: Reasoning that was to be kept is not in the rendering.
    THINKING_LOST = "thinking_lost"
    #: The row itself excludes all its answers from training.
    NO_SUPERVISION = "no_supervision"


class Alteration(StrEnum):
    """What was changed on the way from a row to its prompt. Closed, counted, kept in the manifest.

    The row still gave a prompt; these say in which way it is not the row as it was written (or, as
    `NO_CONTROL_TOKEN`, what else is remarkable about it).
    """

    #: Cut to the longest length that is allowed (`--on-too-long truncate`).
    TRUNCATED = "truncated"
    #: Turns before the first user turn were left out (`--leading drop`).
    LEADING_DROPPED = "leading_dropped"
    #: Reasoning was left out (`--thinking drop`).
    THINKING_DROPPED = "thinking_dropped"
    #: The chat template leaves out some reasoning (`--thinking template`).
    THINKING_HIDDEN = "thinking_hidden"
    #: Reasoning was put into the content as a `<think>` block, as the template knows no field.
    THINKING_INLINED = "thinking_inlined"
    #: Reasoning was written behind the generation prompt, which opens a `<think>` block that the
    #: template closes for no finished turn: what the model itself would have answered.
    THINKING_WRITTEN = "thinking_written"
    #: A text that is taken for rendered has no control token in it: was it?
    NO_CONTROL_TOKEN = "no_control_token"
    #: A role's name was mapped (`--role-map`).
    ROLE_MAPPED = "role_mapped"
    #: Arguments that were a string were rendered as an object: white space may differ.
    ARGUMENTS_PARSED = "arguments_parsed"
    #: Arguments that were an object were rendered as a string of JSON.
    ARGUMENTS_WRITTEN = "arguments_written"
    #: A `function_call` became one of `tool_calls`.
    FUNCTION_CALL_CONVERTED = "function_call_converted"
    #: Tool definitions were found in the column `metadata`.
    TOOLS_FROM_METADATA = "tools_from_metadata"
    #: Bare tool definitions were wrapped as `{"type": "function", "function": …}`.
    TOOLS_WRAPPED = "tools_wrapped"
    #: Tool definitions that the template does not support were left out (`--tools drop`).
    TOOLS_DROPPED = "tools_dropped"
    #: Padding was cut off (`attention_mask`).
    PADDING_CUT = "padding_cut"
    #: The answer in the column `rejected` was left out.
    REJECTED_DROPPED = "rejected_dropped"
    #: The first token of an answer is not trained, as it begins in the generation prompt: white
    #: space that the answer begins with is one token with the line break before it.
    ANSWER_START_UNTRAINED = "answer_start_untrained"


class InputError(Exception):
    """An input file cannot be used. The message names the path and what to do."""


class TokenizerError(Exception):
    """The tokenizer cannot be loaded. The message names it and what to do."""


class RowError(Exception):
    """One row gives no prompt.

    `detail` names fields and turn numbers (from 0), never the row's text.
    """

    def __init__(self, reason: RowReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrigin:
    """Where a row was read."""

    source: str  # path of the input file, as it was given
    line: int  # line in that file, or the row's number where it has no lines; from 1
    part: int | None = None  # which of the prompts that its row expands to, from 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """One input row, rendered and tokenised. N is at least 1."""

    ordinal: int  # position among the non-blank rows of all input files, from 0
    origin: RowOrigin
    label: str | None  # the row's own id as JSON text, so that 1 and "1" stay apart
    input_ids: npt.NDArray[np.int32]  # [N], exactly what the model is sent
    loss_mask: npt.NDArray[np.uint8]  # [N], 1 on the tokens a drafter learns to predict
    alterations: tuple[Alteration, ...] = ()  # sorted, each once
    has_answer: bool = False  # whether an assistant's turn was to be trained
    is_beginning: bool = False  # covers only the beginning of a longer text

    def __post_init__(self) -> None:
        _check_shapes(self.input_ids, self.loss_mask)
        for name, array, dtype in (
            ("input_ids", self.input_ids, np.int32),
            ("loss_mask", self.loss_mask, np.uint8),
        ):
            if array.dtype != dtype:
                raise ValueError(f"{name} must be {np.dtype(dtype)}, not {array.dtype}")
        if not self.input_ids.size:
            raise ValueError("input_ids must not be empty")

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.input_ids.size)

    @property
    def num_trained(self) -> int:
        """How many tokens have mask 1; 0 means that the prompt teaches a drafter nothing."""
        return int(np.count_nonzero(self.loss_mask))

    def cut(self, num_tokens: int) -> Prompt:
        """Its first `num_tokens` tokens, marked as truncated."""
        return replace(
            self,
            input_ids=self.input_ids[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            alterations=tuple(sorted({*self.alterations, Alteration.TRUNCATED})),
        )

    @property
    def key(self) -> str:
        """`prompt_key` of the ids and the mask: equal prompts have equal keys."""
        return prompt_key(self.input_ids, self.loss_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """One input row that gives no prompt, and why. Fields as in `Prompt` and `RowError`."""

    ordinal: int
    origin: RowOrigin
    label: str | None
    reason: RowReason
    detail: str


def prompt_key(ids: npt.NDArray[np.integer], mask: npt.NDArray[np.integer]) -> str:
    """The digest that names a prompt's content: 32 hexadecimal digits.

    XXH3-128 over `KEY_TAG`, N (uint64), the ids (N x int32) and the mask (N bytes), little-endian:
    it can be computed again from any copy of the two, whatever their integer type.
    Raises `ValueError` where the two are not flat and equally long.
    """
    _check_shapes(ids, mask)
    digest = xxhash.xxh3_128(KEY_TAG)
    digest.update(struct.pack("<Q", ids.size))
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()


def is_list_of(value: object, *types: type) -> TypeGuard[list[Any]]:
    """Whether it is a list whose items are of these types, and not of types derived from them:
    `True` is no int."""
    return isinstance(value, list) and set(types).issuperset(map(type, value))


def kind_of(value: object) -> str:
    """What a JSON value is, with its article, as messages call it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = ((str, "a string"), (int | float, "a number"), (list, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), "an object")


def _check_shapes(ids: npt.NDArray[np.integer], mask: npt.NDArray[np.integer]) -> None:
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise ValueError(f"ids {ids.shape} and mask {mask.shape} must be flat and equally long")

"""Reads padding and loss masks from rows of ids, in the columns that trainers write. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prompts.training import IGNORED_LABEL, TOKEN_MASKS
from prompts.types import RowError, RowReason, is_list_of

#: Columns with the ids of a prompt and of its answer, as TRL names them.
ID_PAIR: Final = ("prompt_ids", "completion_ids")
#: Of an ID_PAIR, these may be as long as the answer alone, and mark its trained tokens.
ANSWER_MASKS: Final = ("completion_mask", "response_mask")
#: Columns with a number for each token. Different numbers in one row mean several documents, or
#: token types that the ids alone do not determine.
KINDS: Final = ("token_type_ids", "segment_ids", "document_ids", "seq_idx")
#: Columns with the lengths of the documents in a row (`cu_seqlens`: their boundaries) -> number of
#: entries for a single document.
PACKED: Final[Mapping[str, int]] = {
    **dict.fromkeys(("seq_lengths", "seq_lens", "sequence_lengths"), 1),
    "cu_seqlens": 2,
}
#: All columns that `read_tokens` reads.
COLUMNS: Final = frozenset(
    {"input_ids", "attention_mask", "labels", "position_ids"}.union(
        TOKEN_MASKS, KINDS, PACKED, ID_PAIR
    )
)

Marks = npt.NDArray[np.uint8]  # [N], 0 or 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The tokens of one document."""

    ids: npt.NDArray[np.int32]  # [N]
    loss_mask: Marks | None  # None if the row has no mask
    was_padded: bool


def read_tokens(
    row: Mapping[str, Any],
    ids: Sequence[int],
    *,
    columns: Sequence[str] = ("input_ids",),
    num_prompt: int | None,
) -> Tokens:
    """Strip the padding from `ids`, those of `columns`, and read the mask; all its columns must
    agree.

    `num_prompt`: the number of ids that belong to the prompt, if the row states it. Raises
    `RowError`.
    """
    try:
        return _read_tokens(row, ids, num_prompt)
    except _WrongLength as exc:
        verb = "has" if len(columns) == 1 else "have"
        detail = f"{exc.detail}, {' and '.join(columns)} {verb} {len(ids)}"
        raise RowError(exc.reason, detail) from exc


class _WrongLength(RowError):
    """A column that has another number of entries than there are tokens."""


def _read_tokens(row: Mapping[str, Any], ids: Sequence[int], num_prompt: int | None) -> Tokens:
    array = np.array(ids, dtype=np.int32)
    kept = _kept(row, array.size)
    array = array[kept]
    _check_one_document(row, kept, len(ids))
    masks: dict[str, Marks] = {}
    is_refined = False
    for name in TOKEN_MASKS:
        if (mask := row.get(name)) is None:
            continue
        if (
            num_prompt is not None
            and name in ANSWER_MASKS
            and isinstance(mask, list)
            and len(mask) == len(ids) - num_prompt
        ):
            mask, is_refined = [*[0] * num_prompt, *mask], True
        masks[name] = _marks(name, mask, len(ids), RowReason.BAD_LOSS_MASK)[kept]
    if (labels := row.get("labels")) is not None:
        masks["labels"] = _labelled(labels, array, kept, len(ids))
    if num_prompt is not None and not is_refined:
        masks[ID_PAIR[1]] = (np.arange(len(ids)) >= num_prompt)[kept].astype(np.uint8)
    first = next(iter(masks), "")
    for name, mask in masks.items():
        if not np.array_equal(masks[first], mask):
            detail = f"{first} and {name} disagree; --ignore-column leaves one of them out"
            raise RowError(RowReason.CONFLICTING_FIELDS, detail)
    return Tokens(ids=array, loss_mask=masks.get(first), was_padded=array.size < len(ids))


def _kept(row: Mapping[str, Any], num_tokens: int) -> slice:
    """The slice of tokens without padding."""
    if (mask := row.get("attention_mask")) is None:
        return slice(0, num_tokens)
    marks = _marks("attention_mask", mask, num_tokens, RowReason.BAD_INPUT_IDS)
    (places,) = np.nonzero(marks)
    if not places.size:
        raise RowError(RowReason.EMPTY_PROMPT, "attention_mask is 0 throughout")
    kept = slice(int(places[0]), int(places[-1]) + 1)
    if places.size < kept.stop - kept.start:
        detail = "attention_mask is 0 between tokens: only padding at an end can be cut"
        raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
    return kept


def _labelled(
    labels: object, ids: npt.NDArray[np.int32], kept: slice, num_tokens: int
) -> npt.NDArray[np.uint8]:
    values = _numbers("labels", labels, num_tokens, RowReason.BAD_LOSS_MASK)[kept]
    trained = values != IGNORED_LABEL
    if not np.array_equal(values[trained], ids[trained]):
        before = trained[:-1]
        if before.any() and np.array_equal(values[:-1][before], ids[1:][before]):
            detail = (
                "labels are shifted by one: each is the next token's id; "
                f"write the token's own id, or {IGNORED_LABEL}"
            )
        else:
            detail = f"labels has an entry that is neither {IGNORED_LABEL} nor its token's id"
        raise RowError(RowReason.BAD_LOSS_MASK, detail)
    return np.asarray(trained, dtype=np.uint8)


def _check_one_document(row: Mapping[str, Any], kept: slice, num_tokens: int) -> None:
    for name, num_entries in PACKED.items():
        if isinstance(value := row.get(name), list) and len(value) > num_entries:
            raise _packed(name)
    for name in ("position_ids", *KINDS):
        if (value := row.get(name)) is None:
            continue
        numbers = _numbers(name, value, num_tokens, RowReason.BAD_INPUT_IDS)[kept]
        expected = np.arange(numbers.size) if name == "position_ids" else numbers[0]
        if not np.all(numbers == expected):
            raise _packed(name)


def _packed(name: str) -> RowError:
    what = "does not count from 0" if name == "position_ids" else "differs within the row"
    if name in PACKED:
        what = "has several entries"
    detail = (
        f"{name} {what}, as where several documents are packed into one row: give each a row of "
        f"its own, or pass --ignore-column {name}"
    )
    return RowError(RowReason.UNSUPPORTED_FIELD, detail)


def _marks(name: str, value: object, num_tokens: int, reason: RowReason) -> Marks:
    if not is_list_of(value, int, bool, float) or not {0, 1}.issuperset(value):
        raise RowError(reason, f"{name} is not a flat list of 0 and 1")
    _check_length(name, value, num_tokens, reason)
    return np.array(value, dtype=np.uint8)


def _numbers(name: str, value: object, num_tokens: int, reason: RowReason) -> npt.NDArray[np.int64]:
    # Whole floats: pandas makes them of a column that has nulls.
    if not is_list_of(value, int, float) or not all(
        -(2**63) <= number < 2**63 and number == int(number) for number in value
    ):
        raise RowError(reason, f"{name} is not a flat list of integers")
    _check_length(name, value, num_tokens, reason)
    return np.array(value, dtype=np.int64)


def _check_length(name: str, value: Sequence[object], num_tokens: int, reason: RowReason) -> None:
    if len(value) != num_tokens:
        raise _WrongLength(reason, f"{name} has {len(value)} entries")

"""Recognises training flags, weights and masks of rows and turns by their names. Pure.

Every field about training is either read or fails its row, because ignoring a mask would train a
drafter on the wrong tokens. Names alone would reject too much (`train_loss`, `used_in_training`),
so a name that is not in the tables counts only if its value can be a flag or a mask.
Masks of rows of ids: `prompts.token_masks`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Final

from prompts.tools import NOTHING
from prompts.types import RowError, RowReason

#: Flag of a turn or a whole row -> whether 1 or true means that it is trained.
FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("weight", "loss_weight", "loss_mask", "loss", "compute_loss"), True),
    **dict.fromkeys(("train", "training", "trainable", "train_on_turn"), True),
    "masked": False,
}
#: Flags of a whole row. Its `loss` is a flag only if it is true or false; a number is a statistic.
ROW_FLAGS: Final[Mapping[str, bool]] = {
    **{name: trained for name, trained in FLAGS.items() if name != "loss_mask"},
    **dict.fromkeys(("sample_weight", "example_weight"), True),
}
#: Columns of rows of ids that mark each token: 1 where it is trained.
TOKEN_MASKS: Final = (
    *("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask"),
    *("mask", "loss_weights"),
)
LABELS: Final = ("labels", "label")
IGNORED_LABEL: Final = -100
#: Columns that are not about training despite their names.
HARMLESS: Final = frozenset({"attention_mask", "special_tokens_mask"})

_PLAIN_KEYS: Final = frozenset({"role", "from", "content", "value", "name", "tool_calls"})
_SPEAKS: Final = re.compile(
    r"(?:^|_)(?:[a-z]*mask(?:s|ed|ing)?|weights?|loss(?:es)?"
    r"|(?:un|no)?train(?:s|ed|ing|able)?|supervis(?:e|ed|ion))(?:_|$)"
)
#: `<decimal>`, and `<bytes>` below, are the placeholders for such values from Parquet and Arrow.
_FLAG_TEXT: Final = re.compile(r"true|false|yes|no|[-+]?\d*\.?\d+|<decimal>", re.IGNORECASE)
#: A mask written as text: `[0, 0, 1]`, `0011`.
_MASK_TEXT: Final = re.compile(r"[\[\]\s,01]*[01][\[\]\s,01]+|<bytes>")


@lru_cache(maxsize=4096)
def speaks_of_training(name: str) -> bool:
    """Whether a name contains a word about training, as in `lossMask` or `train-detail`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name[:200])
    return _SPEAKS.search(words.lower()) is not None


def is_trained(
    where: str, role: str, turn: Mapping[str, Any], ignored: Collection[str] = ()
) -> bool:
    """Whether a turn, or a part of one, is trained: the assistant's, unless a flag excludes it.

    Raises `RowError` for flags that are not 0 or 1, that disagree, or that train another role's
    turn, and for any other key about training.
    """
    flags: dict[str, bool] = {}
    for key, value in turn.items():
        if key in _PLAIN_KEYS or value in NOTHING or key in ignored:
            continue
        if key in FLAGS:
            flags[key] = _flag(f"{where}: {key}", key, value) is FLAGS[key]
        elif key == "mask" or _turn_key_speaks(key, value):
            raise _not_understood(f"{where}: {key}", key, "write weight 0 or 1 on the turn")
    if len(set(flags.values())) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{where}: {' and '.join(flags)} disagree")
    for key, trained in flags.items():
        if trained and role != "assistant":
            detail = (
                f"{where}: {key} asks to train it, and only assistant turns are trained: "
                f"change it, or pass --ignore-column {key}"
            )
            raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
        return trained
    return role == "assistant"


def _turn_key_speaks(key: str, value: object) -> bool:
    if key in LABELS:
        return _is_numbers(value)
    if not speaks_of_training(key):
        return False
    return not isinstance(value, str) or _text_speaks(value)


def check_columns(
    row: Mapping[str, Any], *, read: Collection[str], lengths: Collection[int], is_ids: bool
) -> None:
    """Raises `RowError` if an unread column may exclude something from training.

    `lengths`: the possible lengths of a list with one entry for each token or turn. A row that a
    flag excludes as a whole fails with no_supervision.
    """
    for name, value in row.items():
        if name in read or name in HARMLESS or value in NOTHING:
            continue
        if name in ROW_FLAGS and _is_row_flag(name, value):
            if _flag(name, name, value) is not ROW_FLAGS[name]:
                raise RowError(RowReason.NO_SUPERVISION, f"{name} says that it is not trained")
        elif name == "mask" and isinstance(value, str) and value.lower() in ("user", "human"):
            continue  # NeMo: names the role whose turns are not trained
        elif _column_speaks(name, value, lengths, is_ids):
            remedy = "write loss_mask" if is_ids else "write weight 0 or 1 on the turns"
            raise _not_understood(name, name, remedy)


def _is_row_flag(name: str, value: object) -> bool:
    if name == "loss":
        return isinstance(value, bool)
    return isinstance(value, int | float) or (
        isinstance(value, str) and _FLAG_TEXT.fullmatch(value.strip()) is not None
    )


def _column_speaks(name: str, value: object, lengths: Collection[int], is_ids: bool) -> bool:
    if isinstance(value, list):
        if not _is_numbers(value):
            return name in TOKEN_MASKS
        if name in TOKEN_MASKS or name == "labels":
            return True
        is_mask = IGNORED_LABEL in value or {0, 1}.issuperset(value)
        if is_ids and len(value) in lengths and is_mask:
            return True  # a mask under any name
        return speaks_of_training(name) and (is_mask or len(value) in lengths)
    if not speaks_of_training(name):
        return False
    if isinstance(value, str):
        return name == "mask" or _MASK_TEXT.fullmatch(value) is not None
    return isinstance(value, bool) or ("mask" in name.lower() and value in (0, 1))


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and {int, bool, float}.issuperset(map(type, value))


def _text_speaks(value: str) -> bool:
    return (_FLAG_TEXT.fullmatch(value.strip()) or _MASK_TEXT.fullmatch(value)) is not None


def _flag(where: str, name: str, value: object) -> bool:
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    detail = (
        f"{where} is neither 0 nor 1, and a loss mask holds nothing else: change it, "
        f"or pass --ignore-column {name}"
    )
    raise RowError(RowReason.BAD_LOSS_MASK, detail)


def _not_understood(where: str, name: str, remedy: str) -> RowError:
    name = name[:40]
    detail = (
        f"{where[:80]} looks like it says what is trained, and is not understood: {remedy}, "
        f"or pass --ignore-column {name}"
    )
    return RowError(RowReason.UNSUPPORTED_FIELD, detail)

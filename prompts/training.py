"""Recognises training flags, weights and masks of rows and turns by their names. Pure.

Every field about training is either read or fails its row, because ignoring a mask would train a
drafter on the wrong tokens. A name that can only be a mask's counts with any value, also within
`metadata`. Other names alone would reject too much (`train_loss`, `used_in_training`), so they
count only if the value can be a mask, or a flag that excludes something.
Masks of rows of ids: `prompts.token_masks`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import orjson

from prompts.token_bound import parse_json
from prompts.tools import NOTHING
from prompts.types import RowError, RowReason, is_list_of

#: Flag of a turn or a whole row -> whether 1 or true means that it is trained.
FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("weight", "loss_weight", "loss_mask", "loss", "compute_loss"), True),
    **dict.fromkeys(("train", "training", "trainable", "is_trainable"), True),
    "train_on_turn": True,
    "masked": False,
}
#: Columns of a whole row. Numbers other than 0 and 1 are sample weights: they train all tokens
#: alike.
ROW_WEIGHTS: Final = ("weight", "loss_weight", "sample_weight", "example_weight")
#: Flags of a whole row. Its `loss` is a flag only if it is true or false; a number is a statistic.
ROW_FLAGS: Final[Mapping[str, bool]] = {
    **{name: trained for name, trained in FLAGS.items() if name != "loss_mask"},
    **dict.fromkeys(ROW_WEIGHTS, True),
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

_PLAIN_KEYS: Final = frozenset(
    {"role", "from", "content", "value", "name", "tool_calls", "function_call"}
)
#: Keys of turns that may keep an answer out, where they are true (or false).
_EXCLUDING: Final = frozenset(
    {"ignore", "ignored", "skip", "skipped", "exclude", "excluded", "no_grad"}
)
_INCLUDING: Final = frozenset({"target", "is_target", "learn", "learnable", "backprop"})
#: In `metadata` of a row, only these deny training: a weight or a loss there is a figure.
_NESTED_FLAGS: Final = frozenset({"train", "trainable", "is_trainable", "train_on_turn"})

# The patterns below are for names in lower case with `_` between the words.
_TRAIN: Final = r"train(?:s|ed|ing|able)?|loss|mask(?:s|ed|ing)?|supervis(?:e|ed|ion)"
_ANSWER: Final = r"assistants?|completions?|responses?|answers?|outputs?|targets?"
_TURN: Final = r"turn|answer|response|message|assistant"
#: A mask's name, whatever the value is.
_MASK_NAME: Final = re.compile(
    r"(?:^|_)loss_?mask(?:s|ed|ing)?(?:_|$)|^loss_weights$|^masks$"
    rf"|(?:^|_)(?:{_ANSWER}|{_TRAIN}|labels?|tokens?|turns?|prompts?)_(?:\w+_)?masks?(?:_|$)"
)
#: Which spans or turns are trained.
_SPAN_NAME: Final = re.compile(
    rf"(?:^|_)(?:{_TRAIN})_(?:\w+_)?"
    r"(?:spans?|ranges?|turns?|indices|offsets?|segments?|positions)(?:_|$)"
    rf"|(?:^|_)only_(?:the_)?(?:last|first|final)_(?:{_TURN})s?$"
    rf"|^(?:last|first|final)_(?:{_TURN})s?_only$"
)
#: Which roles are trained: even an empty list says it.
_ROLES_NAME: Final = re.compile(r"^roles?_to_train$|^train(?:ed|able|_on)?_roles?$|^train_on$")
#: Where the prompt ends, or how long its answer is.
_BORDER_NAME: Final = re.compile(
    rf"^(?:n_|num_)?(?:prompt|source|question|instruction|query|{_ANSWER}|{_TRAIN})_"
    r"(?:tokens?_)?(?:lengths?|lens?|starts?|ends?|offsets?|begins?|tokens?|count|boundary)$"
)
#: Numbers of reinforcement learning, one for each token.
_REINFORCEMENT_NAME: Final = re.compile(
    r"(?:^|_)(?:rewards?|advantages?|returns?|log_?probs?|log_?ps?|values?|scores?)$|^ref_"
)
#: About a mask or the training, and neither a mask nor a flag.
_ABOUT: Final = re.compile(
    r"^(?:has|num|n)_|_(?:count|ratio|rate|type|token|version|path|url|ids?)$"
)
_DIRECTIVE: Final = re.compile(r"(?:^|_)(?:train_on|train_only|only_train)(?:_|$)")
_NEGATED: Final = re.compile(
    r"(?:^|_)(?:not?|skip|excluded?|ignored?|without|never|dont|disable)_(?:\w+_)?"
    r"(?:train|loss|supervis)|(?:^|_)(?:un|no)(?:train|supervis)"
)
_AFFIRMED: Final = re.compile(
    r"^(?:should|do|to|can)_(?:be_)?train(?:ed)?$|^(?:use_)?(?:for|in)_train(?:ing)?$"
    r"|^(?:use|apply|with|include|include_in)_loss$|^supervised?$"
)
#: Columns that hold an object, or its JSON, about the row.
_METADATA: Final = re.compile(r"(?:^|_)(?:meta\w*|extras?|info|additional\w*|annotations?)(?:_|$)")
#: JSON with a word that `_nested_flag` looks for; the rest need not be parsed.
_NESTED_JSON: Final = re.compile(r"\s*\{.*(?:mask|train|weight|loss)", re.IGNORECASE | re.DOTALL)
_SPEAKS: Final = re.compile(
    r"(?:^|_)(?:[a-z]*mask(?:s|ed|ing)?|weights?|loss(?:es)?"
    r"|(?:un|no)?train(?:s|ed|ing|able)?|supervis(?:e|ed|ion))(?:_|$)"
)
#: `<decimal>`, and `<bytes>` below, are the placeholders for such values from Parquet and Arrow.
_FLAG_TEXT: Final = re.compile(r"true|false|yes|no|[-+]?\d*\.?\d+|<decimal>", re.IGNORECASE)
#: A mask written as text: `[0, 0, 1]`, `0011`.
_MASK_TEXT: Final = re.compile(r"[\[\]\s,01]*[01][\[\]\s,01]+|<bytes>")


def speaks_of_training(name: str) -> bool:
    """Whether a name contains a word about training, as in `lossMask` or `train-detail`."""
    return _is(_SPEAKS, name)


def _is(pattern: re.Pattern[str], name: str) -> bool:
    return _found(pattern, name[:200])


@lru_cache(maxsize=4096)
def _found(pattern: re.Pattern[str], name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name)
    return pattern.search(words.lower()) is not None


def is_trained(
    where: str, role: str, turn: Mapping[str, Any], ignored: Collection[str] = ()
) -> bool:
    """Whether a turn, or a part of one, is trained: the assistant's, unless a flag excludes it.

    Raises `RowError` for flags that are not 0 or 1, that disagree, or that train another role's
    turn, and for any other key about training.
    """
    flags: dict[str, bool] = {}
    for key, value in turn.items():
        if key in _PLAIN_KEYS or value is None or key in ignored:
            continue
        if value in NOTHING and not _is(_ROLES_NAME, key):
            continue
        if key in FLAGS:
            flags[key] = _flag(f"{where}: {key}", key, value) is FLAGS[key]
        elif key in LABELS and _is_label_flag(role, value):
            flags[key] = bool(value)
        elif _turn_key_speaks(key, value, role):
            raise _not_understood(f"{where}: {key}", key, "write weight 0 or 1 on the turn")
        elif nested := _nested_flag(key, value, role, ignored):
            path = f"{where}: {key}: {nested}"
            raise _not_understood(path, nested, "write weight 0 or 1 on the turn")
    if len(set(flags.values())) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{where}: {' and '.join(flags)} disagree")
    for key, trained in flags.items():
        if trained and role != "assistant":
            detail = (
                f"{where}: {key} asks to train it, and only assistant turns are trained: "
                f"change it, or {_ignore(key)}"
            )
            raise RowError(RowReason.UNSUPPORTED_FIELD, detail)
        return trained
    return role == "assistant"


def _is_label_flag(role: str, value: object) -> bool:
    """Axolotl marks what is trained so; elsewhere, and of other values, it is a class."""
    return isinstance(value, bool) or (role == "assistant" and _is_zero_or_one(value))


def _turn_key_speaks(key: str, value: object, role: str) -> bool:
    if key in LABELS:
        return _is_numbers(value)
    if key in _EXCLUDING:
        return value is True
    if key in _INCLUDING:
        return value is False and role == "assistant"
    if key == "mask" or _is(_MASK_NAME, key) or _is(_ROLES_NAME, key):
        return True
    if not speaks_of_training(key):
        return False
    return not isinstance(value, str) or _text_speaks(value)


def check_columns(
    row: Mapping[str, Any],
    *,
    read: Collection[str],
    lengths: Collection[int],
    is_ids: bool,
    has_mask: bool = False,
    ignored: Collection[str] = (),
) -> None:
    """Raises `RowError` if an unread column may exclude something from training.

    `lengths`: the possible lengths of a list with one entry for each token or turn. `has_mask`:
    the row of ids has a mask. `ignored`: keys within columns. A row that a flag excludes as a whole
    fails with no_supervision.
    """
    remedy = "write loss_mask" if is_ids else "write weight 0 or 1 on the turns"
    for name, value in row.items():
        if name in read or name in HARMLESS or value is None:
            continue
        if value in NOTHING and not _is(_ROLES_NAME, name):
            continue
        if name in ROW_FLAGS and not isinstance(value, list | dict):
            _check_row_flag(name, value)
        elif name == "mask" and isinstance(value, str) and value.lower() in ("user", "human"):
            continue  # NeMo: names the role whose turns are not trained
        elif _column_speaks(name, value, lengths, is_ids, has_mask):
            raise _not_understood(name, name, remedy)
        elif nested := _nested_flag(name, value, None, ignored):
            raise _not_understood(f"{name}: {nested}", nested, remedy)


def _check_row_flag(name: str, value: object) -> None:
    """Raises `RowError` for one that denies training, or that may."""
    if isinstance(value, str):
        # Text is no flag, but what it says may be one: `training: "yes"` excludes nothing.
        text = value.strip().lower()
        said = _truth(text)
        if text in ("<decimal>", "<bytes>") or (said is not None and said is not ROW_FLAGS[name]):
            _flag(name, name, value)
        return
    if name == "loss" and not isinstance(value, bool):
        return
    if name in ROW_WEIGHTS and not _is_zero_or_one(value):
        return
    if _flag(name, name, value) is not ROW_FLAGS[name]:
        raise RowError(RowReason.NO_SUPERVISION, f"{name} says that it is not trained")


def _truth(text: str) -> bool | None:
    if text in ("true", "yes"):
        return True
    if text in ("false", "no"):
        return False
    try:
        number = float(text)
    except ValueError:
        return None
    return number != 0


def _column_speaks(
    name: str, value: object, lengths: Collection[int], is_ids: bool, has_mask: bool
) -> bool:
    if is_ids and not has_mask and _is(_BORDER_NAME, name) and _has_numbers(value):
        return True
    if not isinstance(value, list | dict) and _is(_ABOUT, name):
        return False
    if _is(_MASK_NAME, name) or _is(_ROLES_NAME, name):
        return True
    if _is(_SPAN_NAME, name):
        return value is not False
    if isinstance(value, list):
        return _list_speaks(name, value, lengths, is_ids)
    if name == "mask":
        return isinstance(value, str | dict) or _is_zero_or_one(value)
    if isinstance(value, dict) or not speaks_of_training(name):
        return False
    if isinstance(value, str):
        return _MASK_TEXT.fullmatch(value) is not None
    return _is_zero_or_one(value) and _excludes(name, bool(value))


def _list_speaks(name: str, value: list[Any], lengths: Collection[int], is_ids: bool) -> bool:
    if name == "mask":
        return True
    sizes = {len(value)}
    if value and all(map(_is_numbers, value)):  # a mask in one more list
        sizes |= set(map(len, value))
        value = [number for inner in value for number in inner]
    if not _is_numbers(value):
        return False
    fits = not sizes.isdisjoint(lengths)
    is_mask = IGNORED_LABEL in value or {0, 1}.issuperset(value)
    if name == "labels":  # beside turns or text; those of ids are read
        return IGNORED_LABEL in value or (fits and is_mask)
    if speaks_of_training(name):
        return is_mask or fits
    return is_ids and fits and is_mask and not _is(_REINFORCEMENT_NAME, name)


def _excludes(name: str, value: bool) -> bool:
    """Whether a flag that speaks of training would keep anything out of it."""
    if _is(_DIRECTIVE, name):
        return value or re.search(_ANSWER, name.lower()) is not None
    if _is(_NEGATED, name):
        return value
    if _is(_AFFIRMED, name):
        return not value
    if "mask" in name.lower():
        return value or not name.lower().endswith("masked")
    return False


def _nested_flag(
    name: str, value: object, role: str | None, ignored: Collection[str]
) -> str | None:
    """The key within a column (`role`: a key of that role's turn) that can only be a mask's."""
    for key, inner in _keys_within(name, value):
        if key in ignored or inner in NOTHING:
            continue
        if role is not None and key in FLAGS and _is_zero_or_one(inner):
            trained = bool(inner) is FLAGS[key]
            is_flag = key != "loss" or isinstance(inner, bool)
            if role == "assistant" and not trained and is_flag:
                return key
            if role != "assistant" and trained and isinstance(inner, bool):
                return key
        elif role is None and key in _NESTED_FLAGS and _is_zero_or_one(inner) and not inner:
            return key
        elif _is(_MASK_NAME, key) and (isinstance(inner, list | dict) or not _is(_ABOUT, key)):
            return key
    return None


def _keys_within(name: str, value: object, depth: int = 2) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str):
        if not _is(_METADATA, name) or not _NESTED_JSON.match(value):
            return
        try:
            value = parse_json(value)
        except orjson.JSONDecodeError:
            return
    if not isinstance(value, dict) or not {"role", "from"}.isdisjoint(value):
        return  # a turn says it on its own, and one that is not read says nothing
    for key, inner in value.items():
        yield key, inner
        if depth > 1:
            yield from _keys_within(key, inner, depth - 1)


def _is_zero_or_one(value: object) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


def _is_numbers(value: object) -> bool:
    return is_list_of(value, int, bool, float)


def _has_numbers(value: object) -> bool:
    is_number = isinstance(value, int | float) and value is not False
    return is_number or _is_numbers(value)


def _text_speaks(value: str) -> bool:
    return (_FLAG_TEXT.fullmatch(value.strip()) or _MASK_TEXT.fullmatch(value)) is not None


def _flag(where: str, name: str, value: object) -> bool:
    if _is_zero_or_one(value):
        return bool(value)
    kind = " but text" if isinstance(value, str) else ""
    detail = (
        f"{where} is neither 0 nor 1{kind}, and a loss mask holds nothing else: change it, "
        f"or {_ignore(name)}"
    )
    raise RowError(RowReason.BAD_LOSS_MASK, detail)


def _not_understood(where: str, name: str, remedy: str) -> RowError:
    detail = (
        f"{where[:80]} looks like it says what is trained, and is not understood: {remedy}, "
        f"or {_ignore(name)}"
    )
    return RowError(RowReason.UNSUPPORTED_FIELD, detail)


def _ignore(name: str) -> str:
    # A name that is cut would be refused.
    return f"pass --ignore-column {name if len(name) <= 40 else 'with its full name'}"

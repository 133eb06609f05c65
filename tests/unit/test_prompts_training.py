"""Training fields of a row are read or fail the row, in every container."""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
from prompt_files import (
    FORMS,
    as_array,
    as_arrow_file,
    as_arrow_stream,
    as_jsonl,
    as_parquet,
    as_pretty_array,
    read_prompts,
)
from templates import SMOLLM2, tokenizer_for

from prompts.dialects import count_parts
from prompts.inputs import RawRow, scan_inputs
from prompts.reading_options import ReadingOptions, Thinking, Train, Training
from prompts.render import Renderer
from prompts.sniff import require_ignored
from prompts.training import is_trained, speaks_of_training
from prompts.types import Alteration, BadRow, InputError, Prompt, RowOrigin

Row = dict[str, Any]
IDS = [5, 6, 7, 8]
Q, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}


@cache
def plain_renderer() -> Renderer:
    return Renderer(tokenizer_for(SMOLLM2))


def user(**flags: Any) -> Row:
    return {"role": "user", "content": "hi", **flags}


def answer(content: str, **flags: Any) -> Row:
    return {"role": "assistant", "content": content, **flags}


def read(row: Row, options: ReadingOptions | None = None, part: int | None = None) -> Any:
    renderer = plain_renderer() if options is None else Renderer(tokenizer_for(SMOLLM2), options)
    raw = RawRow(
        ordinal=0,
        origin=RowOrigin(source="p", line=1, part=part),
        data=orjson.dumps(row),
    )
    return renderer.prompt_from(raw)


def outcome(item: Prompt | BadRow) -> Any:
    if isinstance(item, BadRow):
        return item.reason.value, item.detail
    return item.input_ids.tolist(), item.loss_mask.tolist(), item.alterations


def trained(item: Prompt | BadRow) -> str:
    assert isinstance(item, Prompt), item
    ids = [number for number, mark in zip(item.input_ids, item.loss_mask, strict=True) if mark]
    return str(tokenizer_for(SMOLLM2).decode(ids))


def refused(item: Prompt | BadRow, reason: str, detail: str) -> None:
    assert isinstance(item, BadRow), item
    assert (item.reason.value, detail in item.detail) == (reason, True), item.detail


#: Columns beside four ids -> ids, mask, changes; or reason and a part of the detail.
ID_ROWS: list[tuple[str, Row, Any]] = [
    ("nothing", {}, (IDS, [1, 1, 1, 1])),
    *(
        (name, {name: [0, 0, 1, 1]}, (IDS, [0, 0, 1, 1]))
        for name in (
            *("loss_mask", "assistant_masks", "assistant_mask", "completion_mask"),
            *("response_mask", "mask", "loss_weights"),
        )
    ),
    ("bools", {"assistant_masks": [False, False, True, True]}, (IDS, [0, 0, 1, 1])),
    ("floats", {"loss_mask": [0.0, 0.0, 1.0, 1.0]}, (IDS, [0, 0, 1, 1])),
    ("labels", {"labels": [-100, -100, 7, 8]}, (IDS, [0, 0, 1, 1])),
    ("labels of none", {"labels": [-100] * 4}, (IDS, [0, 0, 0, 0])),
    (
        "padding at the right",
        {"attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]},
        ([5, 6, 7], [0, 1, 1], (Alteration.PADDING_CUT,)),
    ),
    (
        "padding at both ends",
        {"attention_mask": [0, 1, 1, 0], "loss_mask": [1, 0, 1, 1], "position_ids": [0, 0, 1, 1]},
        ([6, 7], [0, 1], (Alteration.PADDING_CUT,)),
    ),
    ("padding alone", {"attention_mask": [0, 1, 1, 1]}, ([6, 7, 8], [1, 1, 1], ("padding_cut",))),
    ("no padding", {"attention_mask": [1, 1, 1, 1]}, (IDS, [1, 1, 1, 1])),
    ("two agree", {"labels": [-100, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}, (IDS, [0, 1, 1, 1])),
    (
        "harmless",
        {
            "special_tokens_mask": [1, 0, 0, 1],
            "token_type_ids": [0, 0, 0, 0],
            "position_ids": [0, 1, 2, 3],
            "seq_lengths": [4],
            "seq_len": 4,
            "logprobs": [-0.5, -0.25, -1.5, -2.5],
            "loss": 1.25,
            "train_loss": 0.5,
            "weight": 1,
            "label": "chat",
            "split": "train",
            "source": "x",
        },
        (IDS, [1, 1, 1, 1]),
    ),
    ("whole floats", {"labels": [-100.0, -100, 7.0, 8.0]}, (IDS, [0, 0, 1, 1])),
    ("weighted", {"weight": 0.73, "loss_weight": 2.0}, (IDS, [1, 1, 1, 1])),
    (
        "a mask and what it was made from",
        {"loss_mask": [0, 0, 1, 1], "prompt_length": 2, "response_length": 2},
        (IDS, [0, 0, 1, 1]),
    ),
    (
        "reinforcement",
        {
            "rewards": [0, 0, 0, 1],
            "advantages": [0, 0, 1, 1],
            "returns": [1, 1, 1, 1],
            "token_scores": [0, 0, 0, 1],
            "values": [0, 0, 0, 0],
            "ref_logprobs": [0, 0, 0, 0],
            "input_length": 4,
        },
        (IDS, [1, 1, 1, 1]),
    ),
    (
        "no value",
        {"loss_mask_spans": [], "masks": None, "labels_mask": None, "trainable_ranges": False},
        (IDS, [1, 1, 1, 1]),
    ),
    (
        "an answer's mask",
        {
            "input_ids": None,
            "prompt_ids": [5, 6],
            "completion_ids": [7, 8],
            "completion_mask": [0, 1],
        },
        (IDS, [0, 0, 0, 1]),
    ),
    (
        "a short mask of a pair",
        {"input_ids": None, "prompt_ids": [5, 6], "completion_ids": [7, 8], "loss_mask": [1]},
        ("bad_loss_mask", "loss_mask has 1 entries, prompt_ids and completion_ids have 4"),
    ),
    ("a pair", {"input_ids": None, "prompt_ids": [5], "completion_ids": [6]}, ([5, 6], [0, 1])),
    (
        "a pair beside its ids",
        {"prompt_ids": [5, 6, 7], "completion_ids": [8], "completion_mask": [0, 0, 0, 1]},
        (IDS, [0, 0, 0, 1]),
    ),
    # refused
    (
        "two disagree",
        {"labels": [-100, 6, 7, 8], "assistant_masks": [0, 0, 1, 1]},
        ("conflicting_fields", "assistant_masks and labels disagree"),
    ),
    (
        "a pair disagrees",
        {"prompt_ids": [5], "completion_ids": [6, 7, 8], "mask": [0, 0, 1, 1]},
        ("conflicting_fields", "mask and completion_ids disagree"),
    ),
    (
        "another pair",
        {"prompt_ids": [5], "completion_ids": [6]},
        ("conflicting_fields", "prompt_ids and completion_ids are not input_ids"),
    ),
    ("half a pair", {"prompt_ids": [5]}, ("unsupported_field", "without completion_ids")),
    ("shifted", {"labels": [-100, 7, 8, -100]}, ("bad_loss_mask", "shifted by one")),
    ("other labels", {"labels": [-100, 9, 7, 8]}, ("bad_loss_mask", "neither -100 nor")),
    (
        "short labels",
        {"labels": [-100]},
        ("bad_loss_mask", "labels has 1 entries, input_ids has 4"),
    ),
    ("a half", {"mask": [0, 0.5, 1, 1]}, ("bad_loss_mask", "mask is not a flat list of 0 and 1")),
    ("text", {"completion_mask": "0011"}, ("bad_loss_mask", "completion_mask is not a flat")),
    ("long", {"assistant_masks": [1] * 5}, ("bad_loss_mask", "has 5 entries, input_ids has 4")),
    ("a hole", {"attention_mask": [1, 0, 1, 1]}, ("unsupported_field", "between tokens")),
    ("all padding", {"attention_mask": [0] * 4}, ("empty_prompt", "0 throughout")),
    ("documents", {"attention_mask": [1, 1, 2, 2]}, ("bad_input_ids", "attention_mask is not a")),
    ("packed", {"position_ids": [0, 1, 0, 1]}, ("unsupported_field", "several documents")),
    ("lengths", {"seq_lengths": [2, 2]}, ("unsupported_field", "seq_lengths has several")),
    ("borders", {"cu_seqlens": [0, 2, 4]}, ("unsupported_field", "cu_seqlens has several")),
    ("segments", {"segment_ids": [1, 1, 2, 2]}, ("unsupported_field", "segment_ids differs")),
    ("inverse", {"prompt_mask": [1, 1, 0, 0]}, ("unsupported_field", "prompt_mask looks like")),
    ("own name", {"is_answer": [0, 0, 1, 1]}, ("unsupported_field", "is_answer looks like")),
    ("targets", {"targets": [-100, 6, 7, 8]}, ("unsupported_field", "--ignore-column targets")),
    ("weights", {"token_weights": [0.5, 1, 1, 2]}, ("unsupported_field", "token_weights looks")),
    ("words", {"lossMask": [0, 0, 1, 1]}, ("unsupported_field", "lossMask looks like")),
    ("a string", {"train_mask": "[0, 0, 1, 1]"}, ("unsupported_field", "train_mask looks like")),
    ("a directive", {"mask_prompt": True}, ("unsupported_field", "mask_prompt looks like")),
    ("untrained", {"weight": 0}, ("no_supervision", "weight says that it is not trained")),
    ("row text", {"weight": "0"}, ("bad_loss_mask", "weight is neither 0 nor 1 but text")),
    ("in a list", {"labels_mask": [[0, 0, 1, 1]]}, ("unsupported_field", "labels_mask looks")),
    ("own in a list", {"is_answer": [[0, 0, 1, 1]]}, ("unsupported_field", "is_answer looks")),
    ("a struct", {"masks": {"loss_mask": [0, 1]}}, ("unsupported_field", "masks looks")),
    ("a path", {"loss_mask_file": "a.npy"}, ("unsupported_field", "loss_mask_file looks")),
    (
        "in metadata",
        {"metadata": {"loss_mask": [0, 0, 0, 1]}},
        ("unsupported_field", "metadata: loss_mask looks"),
    ),
    (
        "in JSON",
        {"extra_info": '{"a": {"loss_mask": [0, 0, 0, 1]}}'},
        ("unsupported_field", "extra_info: loss_mask looks"),
    ),
    *(
        (name, {name: value}, ("unsupported_field", f"{name} looks"))
        for name, value in (
            *(("trainable_ranges", [[2, 4]]), ("train_spans", [[2, 4]]), ("loss_spans", [2, 4])),
            *(("loss_mask_start", 2), ("prompt_length", 2), ("prompt_len", 2), ("source_len", 2)),
            *(("num_prompt_tokens", 2), ("response_length", 0), ("answer_start", 2)),
            *(("response_length", [2]), ("train_start", 2)),
        )
    ),
    (
        "a long name",
        {f"loss_mask_{'x' * 40}": 1},
        ("unsupported_field", "--ignore-column with its full name"),
    ),
    (
        "half a label",
        {"labels": [-100.0, 6.5, 7, 8]},
        ("bad_loss_mask", "labels is not a flat list of integers"),
    ),
]


def test_every_container_gives_the_same_result_as_a_line(tmp_path: Path) -> None:
    chats = [row for _, row, _ in TURN_ROWS]
    for name, rows in (
        ("ids", [{"input_ids": IDS, **columns} for _, columns, _ in ID_ROWS]),
        ("chats", [{"messages": row} if isinstance(row, list) else row for row in chats]),
    ):
        for form in FORMS:
            for number, row in enumerate(rows):
                path = tmp_path / f"{name}-{form.__name__}-{number}"
                try:
                    path.write_bytes(form([row]))
                except (ValueError, TypeError):  # Arrow: a list of more than one type
                    assert form not in (as_jsonl, as_array, as_pretty_array)
                    continue
                (item,) = read_prompts(scan_inputs([path]), plain_renderer())
                assert outcome(item) == outcome(read(row)), (form.__name__, row)


@pytest.mark.parametrize(
    ("columns", "expected"), [row[1:] for row in ID_ROWS], ids=[r[0] for r in ID_ROWS]
)
def test_columns_beside_ids_are_read_or_fail_the_row(columns: Row, expected: Any) -> None:
    item = read({"input_ids": IDS, **columns})
    if isinstance(expected[0], str):
        refused(item, *expected)
        return
    ids, mask, *alterations = expected
    assert outcome(item) == (ids, mask, alterations[0] if alterations else ())


FIRST, SECOND, BOTH = "one<|im_end|>", "two<|im_end|>", "one<|im_end|>two<|im_end|>"


def chat(first: Row, second: Row | None = None, asked: Row | None = None) -> list[Row]:
    one, two = {**answer("one"), **first}, {**answer("two"), **(second or {})}
    return [user(**(asked or {})), one, user(), two]


#: Turns (or a whole row) -> the text that is trained; or reason and a part of the detail.
TURN_ROWS: list[tuple[str, Any, Any]] = [
    ("nothing", chat({}), BOTH),
    *(
        (f"{name} {value}", chat({name: value}), SECOND)
        for name in (
            *("weight", "loss_weight", "loss_mask", "loss", "compute_loss"),
            *("train", "training", "trainable", "train_on_turn"),
        )
        for value in (0, False, 0.0)
    ),
    ("weight 1", chat({"weight": 1}, {"weight": 1}), BOTH),
    ("both kinds", chat({"weight": 0}, {"weight": 1}), SECOND),
    ("null", chat({"weight": None, "train": None}, {"weight": 0}), FIRST),
    ("masked", chat({"masked": True}, {"masked": False}), SECOND),
    ("user 0", chat({}, {"train": False}, {"train": False, "masked": True, "weight": 0}), FIRST),
    ("agree", chat({"weight": 0, "train": False}), SECOND),
    (
        "harmless",
        chat(
            {"trained_by": "x", "label": "good", "train_detail": [], "labels": {"name": ["x"]}},
            {"score": 0, "toxic": False, "rank": 1},
        ),
        BOTH,
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "one", "train": False},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "two"},
            ]
        },
        SECOND,
    ),
    ("a part", chat({"content": [{"type": "text", "text": "one", "train": True}]}), BOTH),
    ("an answer of its own", {"prompt": [Q], "chosen": {**A, "weight": 1}}, "fine<|im_end|>"),
    (
        "history",
        {"history": chat({"weight": 0}), "prompt": "p", "response": "x"},
        "two<|im_end|>x<|im_end|>",
    ),
    # columns beside
    (
        "harmless columns",
        {
            "messages": [Q, A],
            "label": 0,
            "labels": ["math"],
            "category": "train",
            "split": "train",
            "source": "loss",
            "loss": 0.0,
            "train_loss": 1.5,
            "used_in_training": ["Ultra"],
            "mask_token": "[MASK]",
            "weights_url": "x",
            "training": {"epochs": 1},
            "mask": "User",
            "attention_mask": [1, 1],
            "weight": 1.0,
            "train": True,
        },
        "fine<|im_end|>",
    ),
    ("row weight", {"messages": [Q, A], "weight": 0}, ("no_supervision", "weight says that")),
    ("row train", {"messages": [Q, A], "train": False}, ("no_supervision", "train says that")),
    ("row masked", {"messages": [Q, A], "masked": True}, ("no_supervision", "masked says that")),
    (
        "row no",
        {"messages": [Q, A], "train": "False"},
        ("bad_loss_mask", "train is neither 0 nor 1 but text"),
    ),
    *(
        (f"row {name} {value}", {"messages": [Q, A], name: value}, ("unsupported_field", name))
        for name, value in (
            *(("loss_masks", [[0, 1], [1, 0]]), ("loss_mask_turns", {"1": 0})),
            *(("loss_mask", 0), ("train_turns", [3]), ("trained_turns", 3), ("train_turns", "3")),
            *(("only_last_turn", True), ("train_on_turns", [1]), ("roles_to_train", [])),
            *(("train_on", "none"), ("should_train", False), ("exclude_from_training", True)),
            *(("train_on_answers", False), ("masks", {"assistant": [0, 1]}), ("labels", [0, 1])),
            ("turn_weights", [[0.5], [2]]),
            *(("metadata", {"loss_mask": [0, 1]}), ("metadata", '{"train": false}')),
        )
    ),
    (
        "spans of text",
        {"text": "hello", "loss_mask_spans": [[0, 3]]},
        ("unsupported_field", "loss_"),
    ),
    (
        "columns that exclude nothing",
        {
            "messages": [Q, A],
            "weight": 0.73,
            "loss_weight": 2.0,
            "sample_weight": "0.5",
            "train": "yes",
            "training": "yes",
            "is_train": True,
            "in_train_set": False,
            "used_for_training": True,
            "open_weights": True,
            "has_mask": False,
            "is_supervised": False,
            "labels": [1, 0, 1],
            "only_last_turn": False,
            "train_turns": None,
            "train_on_turns": [],
            "prompt_length": 3,
            "answer_start": 3,
            "num_masked_tokens": 1,
            "metadata": {"weight": 0, "loss": 0, "train": True, "split": "train", "mask": "x"},
            "extra_info": '{"weight": 0.3, "epochs": 3}',
            "other": {"role": "assistant", "content": "x", "loss_mask": 0},
        },
        "fine<|im_end|>",
    ),
    (
        "row labels",
        {"messages": [Q, A], "labels": [-100, 3]},
        ("unsupported_field", "labels looks"),
    ),
    ("row mask", {"messages": [Q, A], "loss_mask": [0, 1]}, ("unsupported_field", "loss_mask")),
    ("per turn", {"messages": [Q, A], "turn_weights": [0.5, 2]}, ("unsupported_field", "turn_w")),
    ("text", {"text": "hello", "loss_mask": [0, 1]}, ("unsupported_field", "loss_mask looks")),
    ("text flag", {"text": "hello", "train": 0}, ("no_supervision", "train says that")),
    ("other role", {"messages": [Q, A], "mask": "Assistant"}, ("unsupported_field", "mask looks")),
    ("directive", {"messages": [Q, A], "train_on_inputs": True}, ("unsupported_field", "train_on")),
    # keys of turns
    ("label", chat({"label": False}, {"label": True}, {"label": False}), SECOND),
    ("label 0", chat({"label": 0}, {"label": 1}, {"label": 1}), SECOND),
    ("is_trainable", chat({"is_trainable": False}), SECOND),
    (
        "keys that exclude nothing",
        chat(
            {"ignore": False, "skip": False, "exclude": False, "target": True, "label": "0"},
            {"learn": True, "backprop": True, "target": 0, "metadata": {"weight": 0.3}},
            {"learn": False, "is_target": False, "extra": {"weight": 0, "train": False}},
        ),
        BOTH,
    ),
    ("user label", chat({}, {}, {"label": True}), ("unsupported_field", "label asks to train")),
    *(
        (f"turn {name} {value}", chat({name: value}), ("unsupported_field", f": {detail} looks"))
        for name, value, detail in (
            *((name, False, name) for name in ("target", "is_target", "learn", "backprop")),
            *((name, True, name) for name in ("ignore", "skip", "exclude")),
            *(("train_on", "none", "train_on"), ("roles_to_train", [], "roles_to_train")),
            *(("metadata", {"train": False}, "train"), ("extra", {"weight": 0}, "weight")),
            *(("extra_info", {"loss_mask": 0}, "loss_mask"), ("labels_mask", "0-3", "labels_mask")),
            ("metadata", '{"a": {"train": false}}', "train"),
        )
    ),
    # refused turns
    ("half", chat({"weight": 0.5}), ("bad_loss_mask", "turn 1 (assistant): weight is neither 0")),
    ("text weight", chat({"weight": "0"}), ("bad_loss_mask", "weight is neither 0 nor 1 but text")),
    ("disagree", chat({"weight": 0, "train": True}), ("conflicting_fields", "weight and train")),
    ("user 1", chat({}, {}, {"weight": 1}), ("unsupported_field", "turn 0 (user): weight asks")),
    ("user seen", chat({}, {}, {"masked": False}), ("unsupported_field", "masked asks to train")),
    (
        "detail",
        chat({"train_detail": [{"begin_offset": 0}]}),
        ("unsupported_field", "train_detail"),
    ),
    ("either way", chat({"mask": 1}), ("unsupported_field", "mask looks like")),
    ("unknown", chat({"no_train": True}), ("unsupported_field", "no_train looks like")),
    ("scale", chat({"loss_scale": 2.0}), ("unsupported_field", "loss_scale looks like")),
    ("token mask", chat({"token_loss_mask": [0, 1]}), ("unsupported_field", "token_loss_mask")),
    (
        "half a turn",
        chat({"content": [{"type": "text", "text": "one", "train": False}]}),
        ("unsupported_field", "part 0 is not to be trained, and only whole turns"),
    ),
    ("all out", chat({"weight": 0}, {"weight": 0}), ("no_supervision", "excludes every answer")),
]


@pytest.mark.parametrize(
    ("row", "expected"), [row[1:] for row in TURN_ROWS], ids=[r[0] for r in TURN_ROWS]
)
def test_training_fields_of_turns_are_read_or_fail_the_row(row: Any, expected: Any) -> None:
    item = read({"messages": row} if isinstance(row, list) else row)
    if isinstance(expected, str):
        assert trained(item) == expected
        assert isinstance(item, Prompt)
        assert item.alterations == ()
    else:
        refused(item, *expected)


@pytest.mark.parametrize("form", [as_parquet, as_arrow_stream, as_arrow_file])
def test_types_that_json_does_not_have_fail_their_row(tmp_path: Path, form: Any) -> None:
    for number, (row, reason) in enumerate(
        [
            ({"input_ids": IDS, "loss_mask": b"\0\0\1\1"}, "bad_loss_mask"),
            ({"input_ids": IDS, "token_mask": b"\0\0\1\1"}, "unsupported_field"),
            ({"input_ids": IDS, "weight": Decimal("0.0")}, "bad_loss_mask"),
            ({"messages": chat({"weight": Decimal("0.0")})}, "bad_loss_mask"),
        ]
    ):
        path = tmp_path / str(number)
        path.write_bytes(form([row]))
        (item,) = read_prompts(scan_inputs([path]), plain_renderer())
        refused(item, reason, "")


def test_rows_of_one_column_type_have_nulls_where_a_turn_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(as_parquet([{"messages": chat({"weight": 0})}, {"messages": chat({})}]))
    items = read_prompts(scan_inputs([path]), plain_renderer())
    assert [trained(item) for item in items] == [SECOND, BOTH]


def test_an_excluded_answer_stays_in_the_history() -> None:
    plain, excluded = read({"messages": chat({})}), read({"messages": chat({"weight": 0})})
    assert plain.input_ids.tolist() == excluded.input_ids.tolist()


def test_the_last_answer_is_the_last_one_whether_it_is_trained_or_not() -> None:
    last = ReadingOptions(training=Training(answers=Train.LAST))
    assert trained(read({"messages": chat({"weight": 0})}, last)) == SECOND
    refused(read({"messages": chat({}, {"weight": 0})}, last), "no_supervision", "every answer")


def test_excluded_answers_do_not_become_parts_of_an_expanded_row() -> None:
    expand = ReadingOptions(thinking=Thinking.EXPAND)
    row = {"messages": [*chat({"weight": 0}), user(), answer("three")]}
    assert count_parts(orjson.dumps(row), expand) == 2
    assert [trained(read(row, expand, part)) for part in (0, 1)] == [SECOND, "three<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"input_ids": IDS, "labels": [0, 1, 0, 1]}, "labels", [1, 1, 1, 1]),
        ({"input_ids": IDS, "labels": [-100] * 4, "mask": [0, 0, 1, 1]}, "labels", [0, 0, 1, 1]),
        ({"input_ids": IDS, "is_answer": [0, 0, 1, 1]}, "is_answer", [1, 1, 1, 1]),
    ],
)
def test_a_column_can_be_ignored(row: Row, name: str, expected: list[int]) -> None:
    assert isinstance(read(row), BadRow)
    item = read(row, ReadingOptions(ignored_columns=(name,)))
    assert item.loss_mask.tolist() == expected


def test_a_key_of_a_turn_can_be_ignored_and_content_cannot() -> None:
    ignoring = ReadingOptions(ignored_columns=("weight", "content"))
    assert trained(read({"messages": chat({"weight": 0.5})}, ignoring)) == BOTH
    with pytest.raises(InputError, match="both name text"):
        ReadingOptions(fields=("text",), ignored_columns=("text",))


def test_a_key_within_a_column_can_be_ignored() -> None:
    ignoring = ReadingOptions(ignored_columns=("loss_mask", "train"))
    turns = chat({"extra": {"train": False}})
    assert trained(read({"messages": turns, "metadata": {"loss_mask": [0]}}, ignoring)) == BOTH


def test_arguments_of_a_call_say_nothing_of_training() -> None:
    call = {"name": "f", "arguments": {"loss_mask": [0, 1]}}
    assert is_trained("turn 1", "assistant", {"role": "assistant", "function_call": call})


def test_an_ignored_name_that_no_row_has_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(as_jsonl([{"text": "x"}, {"messages": chat({"weight": 0})}]))
    second.write_bytes(as_jsonl([{"text": "x", "metadata": '{"loss_mask": [0]}'}]))
    paths = [str(first), str(second)]
    require_ignored(paths[:1], ReadingOptions(ignored_columns=("weight",)))
    require_ignored(paths, ReadingOptions(ignored_columns=("weight", "metadata", "loss_mask")))
    with pytest.raises(InputError, match=r"--ignore-column lossmask: no row .* found: text, mess"):
        require_ignored(paths, ReadingOptions(ignored_columns=("weight", "lossmask")))


def test_two_fields_of_ids_are_a_prompt_and_its_answer() -> None:
    row = {"q": [5], "a": [6, 7]}
    assert outcome(read(row, ReadingOptions(fields=("q", "a"))))[:2] == ([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize("name", ["maskFoo", "loss-mask", "a.weight", "untrained", "supervised"])
def test_names_about_training(name: str) -> None:
    assert speaks_of_training(name)


@pytest.mark.parametrize("name", ["constraint", "trainer_name", "glossary", "weightless"])
def test_names_that_only_look_like_training(name: str) -> None:
    assert not speaks_of_training(name)

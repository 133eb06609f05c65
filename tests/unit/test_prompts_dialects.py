"""Rows: which dialect, which turns, and the reason for every row that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prompts.conversation_parser import Conversation
from prompts.dialects import Ids, Item, RenderedText, decode_row, label_of, read_item
from prompts.types import RowError, RowReason

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yo"}


def item_of(row: dict[str, Any]) -> Item:
    return read_item(decode_row(orjson.dumps(row)))


def turns_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    item = item_of(row)
    assert isinstance(item, Conversation)
    return [(turn.role, turn.content) for turn in item.turns]


def refusal(row: dict[str, Any]) -> tuple[RowReason, str]:
    with pytest.raises(RowError) as caught:
        item_of(row)
    return caught.value.reason, caught.value.detail


def test_messages_with_role_and_content() -> None:
    assert turns_of({"messages": [USER, ANSWER]}) == [("user", "Hi"), ("assistant", "Yo")]


def test_conversations_with_from_and_value() -> None:
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}
    assert turns_of(row) == [("user", "Hi"), ("assistant", "Yo")]


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Yo"}],
        [{"role": "user", "value": "Hi"}, {"from": "gpt", "text": "Yo"}],
        [{"role": "user", "from": "human", "content": "Hi", "value": "Hi"}, ANSWER],
        [{"role": None, "from": "user", "content": None, "value": "Hi"}, ANSWER],
    ],
)
def test_the_two_key_dialects_may_be_mixed(turns: list[dict[str, Any]]) -> None:
    assert turns_of({"conversations": turns}) == [("user", "Hi"), ("assistant", "Yo")]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "user") for name in ("human", "user")),
        *(
            (name, "assistant")
            for name in ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot")
        ),
        ("system", "system"),
        *((name, "tool") for name in ("tool", "function", "observation")),
    ],
)
def test_every_known_role_name_has_its_role(name: str, role: str) -> None:
    assert turns_of({"messages": [USER, {"role": name, "content": "x"}]})[1] == (role, "x")


@pytest.mark.parametrize("name", ["laguna_s", "developer", "User", "", 3, ["user"]])
def test_an_unknown_role_refuses_the_row_and_drops_no_turn(name: Any) -> None:
    reason, detail = refusal({"messages": [USER, {"role": name, "content": "x"}]})
    assert reason == RowReason.UNKNOWN_ROLE
    assert detail.startswith(f"turn 1: role {name!r} is none of user, human, assistant")


def test_the_order_of_attack_is_ids_messages_conversations_text() -> None:
    row: dict[str, Any] = {
        "text": "T",
        "conversations": [{"from": "human", "value": "C"}],
        "messages": [{"role": "user", "content": "M"}],
        "input_ids": [1],
    }
    assert isinstance(item_of(row), Ids)
    row["input_ids"] = None
    assert turns_of(row) == [("user", "M")]
    row["messages"] = []
    assert turns_of(row) == [("user", "C")]
    row["conversations"] = None
    assert item_of(row) == RenderedText(text="T")


def test_content_is_kept_to_the_last_space() -> None:
    assert turns_of({"messages": [{"role": "user", "content": " Hi\n "}]}) == [("user", " Hi\n ")]


def test_text_parts_are_joined_with_nothing_in_between() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert turns_of({"messages": [{"role": "user", "content": parts}]}) == [("user", "a b")]


@pytest.mark.parametrize("field", ["system", "system_prompt"])
def test_a_system_column_is_prepended(field: str) -> None:
    assert turns_of({"messages": [USER], field: "S"}) == [("system", "S"), ("user", "Hi")]


@pytest.mark.parametrize("system", [{}, {"system": None}, {"system": " "}, {"system": "S"}])
def test_a_system_turn_is_kept_and_never_doubled(system: dict[str, Any]) -> None:
    row = {"messages": [{"role": "system", "content": "S"}, USER], **system}
    assert turns_of(row) == [("system", "S"), ("user", "Hi")]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({}, "unknown_shape", "found: no fields"),
        ({"inquiry": "x", "q": 1}, "unknown_shape", "found: inquiry, q"),
        ({"messages": []}, "bad_order", "messages is an empty list"),
        ({"messages": "Hi"}, "bad_content", "messages is a string"),
        ({"messages": ["Hi"]}, "bad_content", "turn 0 is a string, not an object"),
        ({"messages": [{"content": "Hi"}]}, "unknown_role", "turn 0 has no role or from"),
        ({"messages": [ANSWER, USER]}, "bad_order", "turn 0 (assistant) comes before the first"),
        (
            {"messages": [{"role": "system", "content": "S"}, {"role": "tool", "content": "x"}]},
            "bad_order",
            "turn 1 (tool) comes before the first user turn",
        ),
        ({"messages": [{"role": "system", "content": "S"}]}, "bad_order", "no user turn"),
        ({"messages": [USER, {"role": "assistant"}]}, "bad_content", "turn 1 (assistant) has no"),
        ({"messages": [{"role": "user", "content": None}]}, "bad_content", "turn 0 (user) has no"),
        ({"messages": [{"role": "user", "content": ""}]}, "bad_content", "turn 0 (user) is empty"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "bad_content", "is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "bad_content", "is empty"),
        ({"messages": [{"role": "user", "content": 7}]}, "bad_content", "content is a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]},
            "bad_content",
            "turn 0 (user): content: part 0 is 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "bad_content", "part 0 is 'a string'"),
        (
            {"messages": [USER, {"role": "user", "from": "gpt", "content": "x"}]},
            "conflicting_fields",
            "turn 1: role and from disagree",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "value": "b"}]},
            "conflicting_fields",
            "turn 0 (user): content and value disagree",
        ),
        (
            {"messages": [USER], "system": "a", "system_prompt": "b"},
            "conflicting_fields",
            "system and system_prompt disagree",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}, USER], "system": "b"},
            "conflicting_fields",
            "differs from the system turn",
        ),
        ({"messages": [USER], "system": ["a"]}, "bad_content", "system is a list"),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"id": "c"}]}]},
            "bad_tool_call",
            "turn 1 (assistant): tool_calls[0] has no function name",
        ),
        (
            {"messages": [USER, {**ANSWER, "content": None, "tool_calls": [{"id": "c"}]}]},
            "bad_tool_call",
            "tool_calls",
        ),
        (
            {"messages": [{**USER, "reasoning_content": "Add."}]},
            "unsupported_field",
            "turn 0 (user): reasoning outside an assistant turn",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "bad_tool_call", "tools[0]"),
        ({"messages": [USER], "image": "a.png"}, "unsupported_field", "image"),
        ({"text": ""}, "empty_prompt", "text is empty"),
        ({"text": ["x"]}, "bad_content", "text is a list"),
        ({"input_ids": []}, "empty_prompt", "input_ids is empty"),
        ({"input_ids": "1 2"}, "bad_input_ids", "not a flat list of integers"),
        ({"input_ids": [[1, 2]]}, "bad_input_ids", "not a flat list of integers"),
        ({"input_ids": [1, 2.0]}, "bad_input_ids", "not a flat list of integers"),
        ({"input_ids": [1, True]}, "bad_input_ids", "not a flat list of integers"),
        ({"input_ids": [1, None]}, "bad_input_ids", "not a flat list of integers"),
        ({"input_ids": [1, -1]}, "bad_input_ids", "outside [0, 2147483647]"),
        ({"input_ids": [2**31]}, "bad_input_ids", "outside [0, 2147483647]"),
        ({"input_ids": [2**64 - 1]}, "bad_input_ids", "outside [0, 2147483647]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_loss_mask", "1 entries, input_ids has 2"),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_loss_mask", "not a flat list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [0.5]}, "bad_loss_mask", "not a flat list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": "1"}, "bad_loss_mask", "not a flat list of 0 and 1"),
    ],
)
def test_a_refused_row_has_its_reason(row: dict[str, Any], reason: str, detail: str) -> None:
    found_reason, found_detail = refusal(row)
    assert (found_reason, detail in found_detail) == (reason, True), found_detail


@pytest.mark.parametrize("nothing", [None, [], "", "[]", {}])
def test_columns_that_say_nothing_refuse_nothing(nothing: Any) -> None:
    turn = {**ANSWER, "tool_calls": nothing, "reasoning_content": nothing}
    row = {"messages": [USER, turn], "tools": nothing, "images": nothing}
    assert len(turns_of(row)) == 2


def test_other_columns_and_keys_are_ignored() -> None:
    row = {"messages": [{**USER, "markdown": None}], "prompt": "Hi", "metadata": {"k": [1]}}
    assert turns_of(row) == [("user", "Hi")]


def test_ids_and_mask_come_as_they_are() -> None:
    item = item_of({"input_ids": [7, 0, 2**31 - 1], "loss_mask": [0, True, 1], "seq_len": 3})
    assert isinstance(item, Ids)
    assert item.loss_mask is not None
    assert (item.input_ids.dtype, item.loss_mask.dtype) == (np.dtype(np.int32), np.dtype(np.uint8))
    assert item.input_ids.tolist() == [7, 0, 2**31 - 1]
    assert item.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"id": 1}, "1"),
        ({"id": "1"}, '"1"'),
        ({"id": "../../x"}, '"../../x"'),
        ({"id": None, "uuid": "u"}, '"u"'),
        ({"id": [1], "prompt_id": "p"}, '"p"'),
        ({"conversation_id": "c", "uuid": "u"}, '"c"'),
        ({}, None),
    ],
)
def test_labels_are_json_so_that_1_and_the_string_1_stay_apart(
    row: dict[str, Any], label: str | None
) -> None:
    assert label_of(row) == label


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"text":', RowReason.BAD_JSON),
        (b'{"text":"a"} x', RowReason.BAD_JSON),
        (b'{"text":"a","score":NaN}', RowReason.BAD_JSON),
        (b'{"text":"\\ud800"}', RowReason.BAD_JSON),
        (b'{"text":"\xff"}', RowReason.BAD_JSON),
        (b'{"a":' * 100_000, RowReason.ROW_TOO_LARGE),
        (b"[1]", RowReason.NOT_AN_OBJECT),
        (b"null", RowReason.NOT_AN_OBJECT),
        (b'"text"', RowReason.NOT_AN_OBJECT),
    ],
)
def test_a_line_that_is_no_json_object_is_refused(data: bytes, reason: RowReason) -> None:
    with pytest.raises(RowError) as caught:
        decode_row(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_no_json_is_called_that(number: str) -> None:
    with pytest.raises(RowError) as caught:
        decode_row(b'{"text":"NaN","score":%s}' % number.encode())
    assert caught.value.detail.startswith("NaN and Infinity are not JSON (character 2")


def test_a_json_error_tells_where_and_repeats_nothing() -> None:
    with pytest.raises(RowError) as caught:
        decode_row(b'{"text":"secret}')
    assert "character" in caught.value.detail
    assert "secret" not in caught.value.detail


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "from", "content", "value", "text", "type", "x", "name"),
                    *("tool_calls", "function", "arguments", "reasoning", "tools"),
                    *("weight", "train", "masked", "mask", "labels", "train_detail"),
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)
known_fields = st.sampled_from(
    [
        *("input_ids", "loss_mask", "messages", "conversations", "text", "system", "tools", "id"),
        *("data", "input", "output", "instruction", "prompt", "completion", "metadata"),
        *("labels", "attention_mask", "position_ids", "prompt_ids", "completion_ids", "weight"),
        *("train", "mask", "seq_lengths", "token_weights", "conversation", "query", "target"),
    ]
)


# The first text that hypothesis draws on a machine costs it a second of preparation.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(known_fields, json_values))
def test_any_json_object_gives_an_item_or_a_reason(row: dict[str, Any]) -> None:
    label_of(row)
    try:
        item = item_of(row)
    except RowError as exc:
        assert exc.reason in RowReason
        return
    assert isinstance(item, Conversation | RenderedText | Ids)

"""One test for each shape of row that data sets of this field have, under the data set's number."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from prompts.conversation_parser import ChatTurn, Conversation
from prompts.dialects import Ids, RenderedText, decode_row, label_of, read_item
from prompts.reading_options import DEFAULTS, Leading, ReadingOptions
from prompts.types import Alteration, InputError, RowError, RowReason


def item_of(row: dict[str, Any], options: ReadingOptions = DEFAULTS) -> Any:
    return read_item(decode_row(orjson.dumps(row)), options)


def turns_of(row: dict[str, Any], options: ReadingOptions = DEFAULTS) -> list[tuple[str, str]]:
    item = item_of(row, options)
    assert isinstance(item, Conversation)
    return [(turn.role, turn.content) for turn in item.turns]


def refusal(row: dict[str, Any], options: ReadingOptions = DEFAULTS) -> tuple[RowReason, str]:
    with pytest.raises(RowError) as caught:
        item_of(row, options)
    return caught.value.reason, caught.value.detail


def turns(*texts: str) -> list[tuple[str, str]]:
    return [("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]


def test_s1_sharegpt() -> None:
    row = {
        "id": "qWeRt1A_0",
        "conversations": [
            {"from": "human", "value": "Name a prime.", "markdown": None},
            {"from": "gpt", "value": "7", "opencc_converted_markdown": "x"},
            {"from": "user", "value": "Another."},
            {"from": "bing", "value": "11"},
        ],
    }
    assert turns_of(row) == turns("Name a prime.", "7", "Another.", "11")
    assert label_of(row) == '"qWeRt1A_0"'


def test_s1_sharegpt_files_that_begin_with_the_assistant() -> None:
    row = {"conversations": [{"from": "gpt", "value": "…"}, {"from": "human", "value": "Hi"}]}
    reason, detail = refusal(row)
    assert reason == RowReason.BAD_ORDER
    assert detail.startswith("turn 0 (assistant) comes before the first user turn")
    dropping = ReadingOptions(leading=Leading.DROP)
    assert turns_of(row, dropping) == [("user", "Hi")]
    assert item_of(row, dropping).alterations == {Alteration.LEADING_DROPPED}


def test_s2_ultrachat_200k() -> None:
    row = {
        "prompt": "Plan a walk.",
        "prompt_id": "9f0c",
        "messages": [
            {"content": "Plan a walk.", "role": "user"},
            {"content": "Start at noon.", "role": "assistant"},
        ],
    }
    assert turns_of(row) == turns("Plan a walk.", "Start at noon.")
    assert label_of(row) == '"9f0c"'


def test_s2b_ultrachat_as_it_was() -> None:
    row = {"id": "0", "data": ["Why is ice slippery?", "A thin film forms.", "And at -40?"]}
    assert turns_of(row) == turns("Why is ice slippery?", "A thin film forms.", "And at -40?")


def test_s3_perfectblend() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "2+2?"},
            {"from": "gpt", "value": "4"},
        ],
        "source": "x",
    }
    assert turns_of(row) == [("system", "Be brief."), *turns("2+2?", "4")]


def test_s4_perfectblend_regenerated() -> None:
    row = {
        "id": 17,
        "status": "success",
        "conversations": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Add."},
        ],
    }
    assert item_of(row).turns[1] == ChatTurn(role="assistant", content="4", reasoning="Add.")
    assert label_of(row) == "17"


def test_s5_openthoughts_with_its_system_column() -> None:
    thought = "<|begin_of_thought|>mul<|end_of_thought|><|begin_of_solution|>9<|end_of_solution|>"
    row = {
        "system": "Think first.",
        "conversations": [
            {"from": "user", "value": "3*3?"},
            {"from": "assistant", "value": thought},
        ],
    }
    assert turns_of(row) == [("system", "Think first."), ("user", "3*3?"), ("assistant", thought)]


def test_s5b_openthoughts3() -> None:
    row = {"conversations": [{"from": "human", "value": "Q"}, {"from": "assistant", "value": "A"}]}
    assert turns_of(row) == turns("Q", "A")


def test_s6_magpie() -> None:
    row: dict[str, Any] = {
        "uuid": "u-1",
        "instruction": "Hi",
        "response": "Hello",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        "gen_input_configs": {"temperature": 1.0, "top_p": 1.0, "seed": None},
        "other_task_category": ["Chat"],
    }
    assert turns_of(row) == turns("Hi", "Hello")
    assert label_of(row) == '"u-1"'
    row["conversations"][1]["value"] = "Other"
    assert turns_of(row, ReadingOptions(fields=("instruction", "response"))) == turns("Hi", "Hello")


def test_s7_llama_nemotron() -> None:
    row = {
        "input": [{"role": "user", "content": "1+1?"}],
        "output": "<think>easy</think>2",
        "reasoning": "on",
        "system_prompt": "detailed thinking on",
        "category": "math",
        "used_in_training": ["Ultra"],
        "version": "v1",
    }
    assert turns_of(row) == [
        ("system", "detailed thinking on"),
        *turns("1+1?", "<think>easy</think>2"),
    ]
    row["input"] = "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
    reason, detail = refusal(row)
    assert (reason, "rendered already" in detail) == (RowReason.BAD_CONTENT, True)


def test_s8_nemotron_v1_with_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city":"X"}'}}
    row = {
        "uuid": "u-2",
        "reasoning": "off",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_calls": None},
            {"role": "assistant", "content": "Rain."},
        ],
        "metadata": '{"k":1}',
    }
    assert turns_of(row) == [
        ("user", "Weather?"),
        ("assistant", ""),
        ("tool", "rain"),
        ("assistant", "Rain."),
    ]
    (found,) = item_of(row).turns[1].tool_calls
    assert (found.id, found.name, found.arguments) == ("c1", "w", {"city": "X"})
    assert item_of(row).tools == ()


def test_s8_nemotron_v1_with_tools_in_its_metadata() -> None:
    tool = {"type": "function", "function": {"name": "w", "parameters": {}}}
    row = {
        "messages": [{"role": "user", "content": "Hi"}],
        "metadata": orjson.dumps({"tools": [tool]}).decode(),
    }
    item = item_of(row)
    assert (item.tools, item.alterations) == ((tool,), {Alteration.TOOLS_FROM_METADATA})


def test_s9_nemotron_v2() -> None:
    row = {
        "uuid": "u",
        "license": "cc",
        "generator": "g",
        "version": "v2",
        "category": "stem",
        "reasoning": "on",
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
    }
    assert turns_of(row) == turns("Q", "A")


def test_s10_specforge() -> None:
    tool = {"type": "function", "function": {"name": "w"}}
    row = {"id": 3, "conversations": [{"role": "user", "content": "Q"}], "tools": [tool]}
    assert (turns_of(row), item_of(row).tools) == ([("user", "Q")], (tool,))
    assert item_of({"id": "p", "text": "<|im_start|>user\nHi"}) == RenderedText(
        text="<|im_start|>user\nHi"
    )


@pytest.mark.parametrize("label", ["conversation_id", "uuid"])
@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_s11_model_optimizer(label: str, field: str) -> None:
    row = {label: "c", field: [{"role": "user", "content": "Q"}]}
    assert (turns_of(row), label_of(row)) == ([("user", "Q")], '"c"')


def test_s12_speculators_pre_tokenised() -> None:
    item = item_of({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "seq_len": 4})
    assert isinstance(item, Ids)
    assert item.loss_mask is not None
    assert (item.input_ids.tolist(), item.loss_mask.tolist()) == ([1, 2, 3, 4], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "Q", "input": "", "output": "A"}, ("Q", "A")),
        ({"instruction": "Q", "input": "more", "output": "A"}, ("Q\n\nmore", "A")),
        ({"instruction": "Q", "response": "A"}, ("Q", "A")),
        ({"id": "x", "input": "Q", "output": "A", "llm_judgement": "y"}, ("Q", "A")),
        ({"question": "Q", "answer": "A"}, ("Q", "A")),
        ({"message_1": "Q", "message_2": "A", "topic": "t"}, ("Q", "A")),
        ({"problem": "Q", "solution": "A", "level": "5"}, ("Q", "A")),
        ({"prompt": "Q", "completion": "A"}, ("Q", "A")),
        ({"prompt": "Q", "response": "A"}, ("Q", "A")),
        ({"prompt": "Q"}, ("Q",)),
        ({"query": "Q", "response": "A", "original_question": "x", "type": "y"}, ("Q", "A")),
        ({"question": "Q", "generated_solution": "A", "expected_answer": "4"}, ("Q", "A")),
        ({"problem": "Q", "generated_solution": "A", "answer": "4"}, ("Q", "A")),
        ({"input": "Q", "target": "A"}, ("Q", "A")),
        ({"question": "Q", "answer": "A", "target": 3, "label": 1}, ("Q", "A")),
        ({"conversation": [{"role": "user", "content": "Q"}], "chosen": "A"}, ("Q", "A")),
        ({"conversation": "Q: A", "question": "Q", "answer": "A"}, ("Q", "A")),
    ],
)
def test_s13_instruction_pairs(row: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert turns_of(row) == turns(*expected)


def test_s15_lmsys_chat() -> None:
    row = {
        "conversation_id": "c",
        "model": "m",
        "conversation": [{"content": "Q", "role": "user"}, {"content": "A", "role": "assistant"}],
        "turn": 1,
        "language": "English",
        "redacted": False,
    }
    assert (turns_of(row), label_of(row)) == (turns("Q", "A"), '"c"')


def test_s14_role_with_value_and_integer_ids() -> None:
    row = {"id": 4, "conversations": [{"role": "user", "value": "Q"}]}
    assert (turns_of(row), label_of(row)) == ([("user", "Q")], "4")
    assert turns_of({"id": 5, "messages": [{"role": "user", "content": "Q"}]}) == [("user", "Q")]


def test_a_turn_list_that_a_column_of_text_holds_as_json() -> None:
    row = {"messages": '[{"role": "user", "content": "Q"}]'}
    assert turns_of(row) == [("user", "Q")]


def test_the_order_of_attack() -> None:
    row: dict[str, Any] = {
        "text": "T",
        "prompt": "P",
        "data": ["D", "A"],
        "conversations": [{"from": "human", "value": "C"}, {"from": "gpt", "value": "A"}],
        "messages": [{"role": "user", "content": "M"}, {"role": "assistant", "content": "A"}],
        "input_ids": [1],
    }
    assert isinstance(item_of(row), Ids)
    for gone, first in [
        ("input_ids", "M"),
        ("messages", "C"),
        ("conversations", "D"),
        ("data", "P"),
    ]:
        del row[gone]
        assert turns_of(row)[0][1] == first
    del row["prompt"]
    assert item_of(row) == RenderedText(text="T")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("dialog",), turns("a", "b")),
        (("lines",), turns("a", "b")),
        (("body",), [("user", "whole")]),
        (("q", "a"), turns("Q", "A")),
    ],
)
def test_field_names_the_column_and_its_value_decides(
    fields: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    row = {
        "messages": [{"role": "user", "content": "not this"}],
        "dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "lines": ["a", "b"],
        "body": "whole",
        "q": "Q",
        "a": "A",
    }
    assert turns_of(row, ReadingOptions(fields=fields)) == expected


def test_field_takes_ids_and_text_as_well_and_says_what_is_missing() -> None:
    ids = item_of({"tokens": [5, 6], "text": "T"}, ReadingOptions(fields=("tokens",)))
    assert ids.input_ids.tolist() == [5, 6]
    both = {"text": "T", "messages": [{"role": "user", "content": "M"}]}
    assert item_of(both, ReadingOptions(fields=("text",))) == RenderedText(text="T")
    reason, detail = refusal(both, ReadingOptions(fields=("chat",)))
    assert reason == RowReason.UNKNOWN_SHAPE
    assert detail == "--field chat: there is no such column; found: text, messages"
    with pytest.raises(InputError, match="name one column, or two"):
        ReadingOptions(fields=("a", "b", "c"))


# --- nothing is left out in silence -------------------------------------------------------------

Q = {"role": "user", "content": "Q"}
A = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"instruction": "i", "input": "x", "output": "o", "history": [["q", "a"]]},
            turns("q", "a", "i\n\nx", "o"),
        ),
        ({"instruction": "i", "output": "o", "history": []}, turns("i", "o")),
        ({"instruction": "i", "output": "o", "history": [Q, A]}, turns("Q", "A", "i", "o")),
        ({"prompt": "p", "history": [["q", "a"]]}, turns("q", "a", "p")),
        ({"instruction": "i", "context": "c", "response": "o"}, turns("i\n\nc", "o")),
        ({"system_prompt": "", "question": "q", "response": "a"}, turns("q", "a")),
        ({"prompt": "p", "answer": "a"}, turns("p", "a")),
        ({"prompt": "p", "response": "a", "completion": "a"}, turns("p", "a")),
        ({"problem": "p", "solution": "so 4", "answer": "4"}, turns("p", "so 4")),
        ({"prompt": [Q], "completion": "a"}, turns("Q", "a")),
        ({"prompt": "Q", "completion": [A]}, turns("Q", "A")),
        ({"input": [Q], "output": "", "response": "a"}, turns("Q", "a")),
        ({"prompt": "p", "text": "t", "completion": "c"}, turns("p", "c")),
    ],
)
def test_history_context_and_answers_of_every_column_are_read(
    row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert turns_of(row) == expected
    assert item_of(row).alterations == set()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "chosen": "A"},
        {"prompt": "Q", "chosen": [Q, A]},
        {"prompt": "Q", "chosen": [A]},
        {"prompt": [Q], "chosen": [A]},
        {"chosen": [Q, A]},
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": A},
        {"prompt": "Q", "messages": [Q, A], "chosen": [Q, A]},
    ],
)
def test_the_chosen_answer_is_read_and_the_rejected_one_counted(row: dict[str, Any]) -> None:
    item = item_of({**row, "rejected": "B"})
    assert [(turn.role, turn.content) for turn in item.turns] == turns("Q", "A")
    assert item.alterations == {Alteration.REJECTED_DROPPED}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"prompt": "p", "response": "a", "completion": "b"}, "conflicting_fields", "response and"),
        ({"prompt": "p", "question": "q", "answer": "a"}, "conflicting_fields", "question and"),
        ({"prompt": "p", "question": "q"}, "conflicting_fields", "question and prompt disagree"),
        (
            {"query": "q", "question": "p", "answer": "a"},
            "conflicting_fields",
            "question and query",
        ),
        ({"input": "q", "output": "o", "target": "t"}, "conflicting_fields", "output and target"),
        ({"prompt": "p", "chosen": [Q, A]}, "conflicting_fields", "chosen begins with other turns"),
        ({"question": "q", "answer": "a", "context": "c"}, "unsupported_field", "context would be"),
        ({"prompt": "p", "responses": ["a", "b"]}, "unsupported_field", "responses would be left"),
        ({"messages": [Q], "answer": "a"}, "unsupported_field", "answer would be left out"),
        ({"messages": [Q, A], "history": [["q", "a"]]}, "conflicting_fields", "history stands"),
        (
            {"instruction": "i", "output": "o", "history": ["q", "a"]},
            "bad_content",
            "history is no list of [question, answer]",
        ),
        ({"question": "q", "answer": 42}, "bad_content", "answer is a number, not a string"),
        ({"instruction": 5, "output": "o"}, "bad_content", "instruction is a number, not a"),
    ],
)
def test_columns_that_would_be_left_out_refuse_the_row(
    row: dict[str, Any], reason: str, detail: str
) -> None:
    found_reason, found_detail = refusal(row)
    assert (found_reason, detail in found_detail) == (reason, True), found_detail


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"text": None}, "nothing to read: text is null"),
        ({"question": "q", "answer": None}, "question is a string, answer is null"),
        ({"output": "o"}, "an answer without its question"),
        ({"body": "b"}, "output, response, answer, message_2"),
    ],
)
def test_an_unknown_shape_says_what_is_there_and_what_is_known(
    row: dict[str, Any], detail: str
) -> None:
    reason, found = refusal(row)
    assert (reason, detail in found) == (RowReason.UNKNOWN_SHAPE, True), found
    assert "none of" not in found or not set(row) & {"text", "question", "answer", "output"}


# --- cases of single rows -----------------------------------------------------------------------


def test_case_75_two_key_dialects_in_one_conversation() -> None:
    mixed = [{"from": "human", "value": "hi"}, {"role": "assistant", "content": "yo"}]
    assert turns_of({"conversations": mixed}) == turns("hi", "yo")
    assert refusal({"conversations": [{"role": "user", "content": "a", "value": "b"}]})[0] == (
        RowReason.CONFLICTING_FIELDS
    )


def test_case_76_an_unknown_role_refuses_the_row_unless_it_is_mapped() -> None:
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "laguna_s", "value": "yo"}]}
    reason, detail = refusal(row)
    assert (reason, "--role-map" in detail) == (RowReason.UNKNOWN_ROLE, True)
    mapped = ReadingOptions(role_map={"laguna_s": "assistant"})
    assert turns_of(row, mapped) == turns("hi", "yo")
    assert item_of(row, mapped).alterations == {Alteration.ROLE_MAPPED}
    developer = {
        "messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    }
    assert refusal(developer)[0] == RowReason.UNKNOWN_ROLE
    as_system = ReadingOptions(role_map={"developer": "system"})
    assert turns_of(developer, as_system) == [("system", "d"), ("user", "u")]
    with pytest.raises(InputError, match="the roles are system, developer, user"):
        ReadingOptions(role_map={"x": "narrator"})


def test_case_78_a_system_column_is_kept_and_never_doubled() -> None:
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "u"}], "system_prompt": "s"}
    assert turns_of(row) == [("system", "s"), ("user", "u")]
    row["messages"].insert(0, {"role": "system", "content": "s"})
    assert turns_of(row) == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize("content", [None, "", "  "])
def test_case_80_empty_content_is_for_tool_calls_only(content: str | None) -> None:
    call = {"function": {"name": "w", "arguments": {}}}
    user = {"role": "user", "content": "u"}
    item = item_of(
        {"messages": [user, {"role": "assistant", "content": content, "tool_calls": [call]}]}
    )
    assert not item.turns[1].content.strip()
    for row in (
        [{"role": "user", "content": content}],
        [user, {"role": "assistant", "content": content}],
    ):
        assert refusal({"messages": row})[0] == RowReason.BAD_CONTENT


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city":"Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("{city:Paris}", "arguments: a string that is no JSON"),
        ("[1,2]", "arguments are a list, not an object"),
        (None, {}),
        ("", {}),
    ],
)
def test_case_81_arguments_are_an_object_or_a_string_of_one(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "w", "arguments": arguments}}
    row = {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    if isinstance(expected, dict):
        assert item_of(row).turns[1].tool_calls[0].arguments == expected
        return
    reason, detail = refusal(row)
    assert (reason, expected in detail) == (RowReason.BAD_TOOL_CALL, True), detail


@pytest.mark.parametrize("as_text", [True, False])
def test_case_81_calls_and_tools_may_be_json_in_a_string(as_text: bool) -> None:
    calls: Any = [{"function": {"name": "w", "arguments": {"a": 1}}}]
    tools: Any = [{"name": "w", "parameters": {"type": "object"}}]
    if as_text:
        calls, tools = orjson.dumps(calls).decode(), orjson.dumps(tools).decode()
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    item = item_of({"messages": [{"role": "user", "content": "u"}, turn], "tools": tools})
    assert item.turns[1].tool_calls[0].arguments == {"a": 1}
    assert item.tools == (
        {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}},
    )
    assert item.alterations == {Alteration.TOOLS_WRAPPED}


def test_case_81_a_function_call_of_old_is_converted_and_counted() -> None:
    turn = {"role": "assistant", "content": None, "function_call": {"name": "w", "arguments": "{}"}}
    item = item_of({"messages": [{"role": "user", "content": "u"}, turn]})
    assert (item.turns[1].tool_calls[0].name, item.alterations) == (
        "w",
        {Alteration.FUNCTION_CALL_CONVERTED},
    )


def test_case_82_parts_of_text_are_joined_and_images_refused() -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns_of({"messages": [{"role": "user", "content": parts}]}) == [("user", "ab")]
    parts.append({"type": "image_url", "image_url": {"url": "x"}})
    reason, detail = refusal({"messages": [{"role": "user", "content": parts}]})
    assert (reason, "only text can be rendered" in detail) == (RowReason.BAD_CONTENT, True)
    row = {"messages": [{"role": "user", "content": "u"}], "images": ["a.png"]}
    assert refusal(row)[0] == RowReason.UNSUPPORTED_FIELD


@pytest.mark.parametrize(
    "row",
    [{"id": "e", "messages": []}, {"id": "e2", "input_ids": []}, {"id": "e3", "prompt": "   "}],
)
def test_case_23_an_empty_prompt_is_refused(row: dict[str, Any]) -> None:
    assert refusal(row)[0] in (RowReason.EMPTY_PROMPT, RowReason.BAD_ORDER)

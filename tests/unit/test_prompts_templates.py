"""What is trained, spelled out as text, on small equivalents of well-known chat templates."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from templates import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA,
    GENERATION,
    GLM,
    GPT_OSS,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    QWEN3,
    QWEN3_FIELD,
    SMOLLM2,
    tokenizer_for,
)

from prompts.inputs import RawRow
from prompts.reading_options import (
    ReadingOptions,
    TemplateOptions,
    Thinking,
    Tools,
    Train,
    Training,
)
from prompts.render import Renderer
from prompts.types import Alteration, BadRow, Prompt, RowOrigin, RowReason

TEMPLATES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "qwen3-field": QWEN3_FIELD,
    "deepseek-v3.1": DEEPSEEK_V31,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "kimi-k2": KIMI_K2,
    "glm": GLM,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "smollm2": SMOLLM2,
    "generation": GENERATION,
}
TOKENIZERS = {name: tokenizer_for(template) for name, template in TEMPLATES.items()}

Turns = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def thoughtful(content: str, reasoning: str) -> dict[str, Any]:
    return answer(content, reasoning_content=reasoning)


def call(name: str = "w", arguments: Any = None, call_id: str = "a1b2c3d4e") -> dict[str, Any]:
    function = {"name": name, "arguments": {"city": "Rom"} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(content: str, call_id: str = "a1b2c3d4e") -> dict[str, Any]:
    return {"role": "tool", "name": "w", "content": content, "tool_call_id": call_id}


def read(
    name: str,
    turns: Turns,
    options: ReadingOptions | None = None,
    part: int | None = None,
    **row: Any,
) -> Prompt | BadRow:
    data = orjson.dumps({"messages": turns, **row})
    raw = RawRow(ordinal=0, origin=RowOrigin(source="a", line=1, part=part), data=data)
    return Renderer(TOKENIZERS[name], options or ReadingOptions()).prompt_from(raw)


def prompt_of(name: str, turns: Turns, *args: Any, **row: Any) -> Prompt:
    prompt = read(name, turns, *args, **row)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def text_of(name: str, prompt: Prompt) -> str:
    return str(TOKENIZERS[name].decode(prompt.input_ids.tolist(), skip_special_tokens=False))


def runs(name: str, prompt: Prompt) -> list[str]:
    """The text of each run of trained tokens."""
    pairs = zip(prompt.loss_mask.tolist(), prompt.input_ids.tolist(), strict=True)
    return [
        TOKENIZERS[name].decode([token for _, token in run], skip_special_tokens=False)
        for marked, run in groupby(pairs, key=lambda pair: pair[0])
        if marked
    ]


def trained(name: str, turns: Turns, *args: Any, **row: Any) -> list[str]:
    return runs(name, prompt_of(name, turns, *args, **row))


# --- plain conversations ------------------------------------------------------------------------

PLAIN = [user("hello"), answer("fine thanks"), user("so?"), answer("hm,\nyes")]
PLAIN_EXPECTED = {
    "llama3": ["fine thanks<|eot_id|>", "hm,\nyes<|eot_id|>"],
    # The empty block is the model's to write: its generation prompt does not have it.
    "qwen3": ["fine thanks<|im_end|>", "<think>\n\n</think>\n\nhm,\nyes<|im_end|>"],
    "qwen3-field": ["fine thanks<|im_end|>", "<think>\n\n</think>\n\nhm,\nyes<|im_end|>"],
    "deepseek-v3.1": ["fine thanks<｜end▁of▁sentence｜>", "hm,\nyes<｜end▁of▁sentence｜>"],
    "deepseek-v3": ["fine thanks<｜end▁of▁sentence｜>", "hm,\nyes<｜end▁of▁sentence｜>"],
    "deepseek-r1": ["fine thanks<｜end▁of▁sentence｜>", "hm,\nyes<｜end▁of▁sentence｜>"],
    "kimi-k2": ["fine thanks<|im_end|>", "hm,\nyes<|im_end|>"],
    # Nothing in the rendering ends an answer; what follows belongs to the next turn.
    "glm": ["\n<think></think>\nfine thanks", "\n<think></think>\nhm,\nyes"],
    "mistral": [" fine thanks</s>", " hm,\nyes</s>"],
    "gemma": ["fine thanks<end_of_turn>", "hm,\nyes<end_of_turn>"],
    "gpt-oss": [
        "<|channel|>final<|message|>fine thanks<|end|>",
        "<|channel|>final<|message|>hm,\nyes<|return|>",
    ],
    "smollm2": ["fine thanks<|im_end|>", "hm,\nyes<|im_end|>"],
    "generation": ["fine thanks<|im_end|>", "hm,\nyes<|im_end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_every_answer_is_trained_and_nothing_else(name: str, system: bool) -> None:
    turns = [{"role": "system", "content": "be kind"}, *PLAIN] if system else PLAIN
    prompt = prompt_of(name, turns)
    assert runs(name, prompt) == PLAIN_EXPECTED[name]
    expected = TOKENIZERS[name].apply_chat_template(turns, return_dict=False)
    assert prompt.input_ids.tolist() == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answer_only(name: str) -> None:
    last = ReadingOptions(training=Training(answers=Train.LAST))
    assert trained(name, PLAIN, last) == PLAIN_EXPECTED[name][-1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_case_89_no_special_token_is_doubled(name: str) -> None:
    ids = prompt_of(name, PLAIN).input_ids.tolist()
    special = set(TOKENIZERS[name].all_special_ids)
    assert not [one for one, two in pairwise(ids) if one == two and one in special]


# --- reasoning ----------------------------------------------------------------------------------

THOUGHT = [user("2+2?"), thoughtful("4", "add"), user("3*3?"), thoughtful("9", "mul")]


def test_case_90_qwen3_hides_the_reasoning_of_earlier_turns_and_that_is_counted() -> None:
    prompt = prompt_of("qwen3", THOUGHT)
    assert runs("qwen3", prompt) == ["4<|im_end|>", "<think>\nmul\n</think>\n\n9<|im_end|>"]
    assert prompt.alterations == (Alteration.THINKING_HIDDEN,)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thinking_content"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\nadd\n</think>\n\n4<|im_end|>"),
        ("glm", "\n<think>add</think>\n4"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>add<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4<|return|>",
        ),
    ],
)
def test_case_90_every_synonym_reaches_the_field_that_the_template_reads(
    name: str, key: str, expected: str
) -> None:
    prompt = prompt_of(name, [user("2+2?"), answer("4", **{key: "add"})])
    assert (runs(name, prompt), prompt.alterations) == ([expected], ())


def test_case_90_keep_fails_a_row_whose_reasoning_the_template_hides() -> None:
    bad = read("qwen3", THOUGHT, ReadingOptions(thinking=Thinking.KEEP))
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.THINKING_LOST
    assert bad.detail == "turn 1 (assistant): the template leaves its reasoning out"


@pytest.mark.parametrize("name", ["kimi-k2", "smollm2", "llama3", "generation"])
def test_case_90_keep_writes_a_block_where_the_template_knows_no_reasoning(name: str) -> None:
    prompt = prompt_of(name, THOUGHT, ReadingOptions(thinking=Thinking.KEEP))
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    assert runs(name, prompt) == [
        f"<think>\nadd\n</think>\n\n4{end}",
        f"<think>\nmul\n</think>\n\n9{end}",
    ]
    assert prompt.alterations == (Alteration.THINKING_INLINED,)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n not in ("qwen3", "glm", "gpt-oss")])
def test_case_90_a_template_without_reasoning_hides_it_and_that_is_counted(name: str) -> None:
    assert prompt_of(name, THOUGHT).alterations == (Alteration.THINKING_HIDDEN,)


@pytest.mark.parametrize(
    "turn",
    [
        thoughtful("9", "mul"),
        answer("<think>\nmul\n</think>\n\n9"),
        answer(
            "<|begin_of_thought|>\nmul <|end_of_thought|>\n"
            "<|begin_of_solution|>9<|end_of_solution|>"
        ),
    ],
)
def test_case_90_drop_takes_reasoning_out_and_counts_it(turn: dict[str, Any]) -> None:
    prompt = prompt_of("smollm2", [user("3*3?"), turn], ReadingOptions(thinking=Thinking.DROP))
    assert runs("smollm2", prompt) == ["9<|im_end|>"]
    assert prompt.alterations == (Alteration.THINKING_DROPPED,)
    untouched = prompt_of("smollm2", PLAIN, ReadingOptions(thinking=Thinking.DROP))
    assert untouched.alterations == ()


def test_case_90_expand_gives_each_answer_its_reasoning_and_the_history_as_it_was_seen() -> None:
    expand = ReadingOptions(thinking=Thinking.EXPAND)
    first = prompt_of("qwen3", THOUGHT, expand, 0)
    second = prompt_of("qwen3", THOUGHT, expand, 1)
    assert runs("qwen3", first) == ["<think>\nadd\n</think>\n\n4<|im_end|>"]
    assert runs("qwen3", second) == ["<think>\nmul\n</think>\n\n9<|im_end|>"]
    assert "add" not in text_of("qwen3", second)
    assert (first.origin.part, second.origin.part, second.alterations) == (0, 1, ())


@pytest.mark.parametrize("thinking", [Thinking.KEEP, Thinking.EXPAND])
@pytest.mark.parametrize(
    "turn",
    [thoughtful("4", "add"), answer("<think>\nadd\n</think>\n\n4")],
    ids=["field", "inline"],
)
def test_case_90_reasoning_is_written_where_only_the_generation_prompt_opens_a_block(
    thinking: Thinking, turn: dict[str, Any]
) -> None:
    turns = [user("hello"), answer("fine"), user("2+2?"), turn]
    prompt = prompt_of(
        "deepseek-r1",
        turns,
        ReadingOptions(thinking=thinking, training=Training(answers=Train.LAST)),
    )
    assert runs("deepseek-r1", prompt) == ["add\n</think>\n\n4<｜end▁of▁sentence｜>"]
    assert text_of("deepseek-r1", prompt).endswith(
        "<｜User｜>2+2?<｜Assistant｜><think>\nadd\n</think>\n\n4<｜end▁of▁sentence｜>"
    )
    assert prompt.alterations == (Alteration.THINKING_WRITTEN,)
    untrained = ReadingOptions(
        thinking=thinking, training=Training(answers=Train.LAST, reasoning=False)
    )
    assert trained("deepseek-r1", turns, untrained) == ["4<｜end▁of▁sentence｜>"]


def test_case_90_reasoning_of_an_earlier_turn_cannot_be_written_there() -> None:
    bad = read("deepseek-r1", THOUGHT, ReadingOptions(thinking=Thinking.KEEP))
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.THINKING_LOST


def test_case_94_a_rendered_text_gets_no_special_token_and_a_plain_one_is_remarked_on() -> None:
    for text, remarks in [
        ("<|im_start|>user\nHi<|im_end|>\n", ()),
        ("plain", (Alteration.NO_CONTROL_TOKEN,)),
    ]:
        raw = RawRow(
            ordinal=0,
            origin=RowOrigin(source="a", line=1),
            data=orjson.dumps({"id": "p", "text": text}),
        )
        prompt = Renderer(TOKENIZERS["llama3"]).prompt_from(raw)
        assert isinstance(prompt, Prompt)
        assert text_of("llama3", prompt) == text
        assert prompt.alterations == remarks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ["4<|im_end|>", "9<|im_end|>"]),
        ("glm", ["4", "9"]),
        ("gpt-oss", ["<|channel|>final<|message|>4<|end|>", "9<|return|>"]),
    ],
)
def test_thinking_can_be_left_untrained(name: str, expected: list[str]) -> None:
    assert trained(name, THOUGHT, ReadingOptions(training=Training(reasoning=False))) == expected
    # An empty block that the template writes is no answer, either.
    plain = [run.rpartition("</think>")[2].lstrip() for run in PLAIN_EXPECTED[name]]
    if name != "gpt-oss":
        assert trained(name, PLAIN, ReadingOptions(training=Training(reasoning=False))) == plain


# --- a </think> that does not end reasoning ----------------------------------------------------

#: Answers that only mention the tag.
MENTIONS = [
    "Close it with `</think>` then.",
    "Write:\n```\nthought\n</think>\n\nanswer\n```\nso",
    'It prints "</think>" there.',
    "Use <think>a</think> around it.",
    "a <think>\nb\n</think>\n\nc",
]
BLOCK = "<think>\nadd\n</think>\n\n"


def with_answer(content: str) -> Turns:
    return [user("hello"), answer(content), user("so?"), answer(content)]


@pytest.mark.parametrize("content", MENTIONS)
@pytest.mark.parametrize(
    ("name", "first", "last", "end"),
    [
        ("smollm2", "", "", "<|im_end|>"),
        ("qwen3-field", "", "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("llama3", "", "", "<|eot_id|>"),
    ],
)
def test_a_tag_that_an_answer_mentions_is_part_of_it(
    name: str, content: str, first: str, last: str, end: str
) -> None:
    prompt = prompt_of(name, with_answer(content))
    assert runs(name, prompt) == [f"{first}{content}{end}", f"{last}{content}{end}"]
    assert prompt.alterations == ()
    bare = [f"{content}{end}"] * 2
    untrained = ReadingOptions(training=Training(reasoning=False))
    assert trained(name, with_answer(content), untrained) == bare
    dropped = prompt_of(name, with_answer(content), ReadingOptions(thinking=Thinking.DROP))
    assert runs(name, dropped) == runs(name, prompt)
    assert dropped.alterations == ()
    for thinking in (Thinking.KEEP, Thinking.EXPAND):
        kept = prompt_of(name, with_answer(content), ReadingOptions(thinking=thinking), 1)
        assert runs(name, kept)[-1] == f"{last}{content}{end}"


@pytest.mark.parametrize("content", MENTIONS)
@pytest.mark.parametrize("turn", [answer, lambda text: thoughtful(text, "add")])
def test_reasoning_ends_at_its_own_tag_and_not_at_one_that_the_answer_mentions(
    content: str, turn: Any
) -> None:
    turns = [user("hello"), turn(content) if turn is not answer else answer(BLOCK + content)]
    whole = [f"{BLOCK}{content}<|im_end|>"]
    bare = [f"{content}<|im_end|>"]
    for thinking in (Thinking.TEMPLATE, Thinking.KEEP, Thinking.EXPAND):
        options = ReadingOptions(thinking=thinking)
        prompt = prompt_of("qwen3-field", turns, options, 0)
        assert (runs("qwen3-field", prompt), prompt.alterations) == (whole, ())
        untrained = ReadingOptions(thinking=thinking, training=Training(reasoning=False))
        assert trained("qwen3-field", turns, untrained, 0) == bare
    dropping = ReadingOptions(thinking=Thinking.DROP)
    for name, empty in (("smollm2", ""), ("qwen3-field", "<think>\n\n</think>\n\n")):
        prompt = prompt_of(name, turns, dropping)
        assert runs(name, prompt) == [empty + bare[0]]
        assert prompt.alterations == (Alteration.THINKING_DROPPED,)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "deepseek-v3.1"])
@pytest.mark.parametrize(
    "options", [ReadingOptions(), ReadingOptions(training=Training(answers=Train.LAST))]
)
def test_a_template_that_cuts_an_answer_at_a_tag_fails_the_row(
    name: str, options: ReadingOptions
) -> None:
    for turns in (with_answer(MENTIONS[0]), [*with_answer(MENTIONS[0])[:2], user("so?"), PLAIN[1]]):
        bad = read(name, turns, options)
        assert isinstance(bad, BadRow), (turns, bad)
        assert bad.reason in (RowReason.MASK_FAILED, RowReason.RENDER_FAILED)


def test_a_template_that_cuts_at_the_first_tag_keeps_those_behind_it() -> None:
    turns = [user("hello"), answer(BLOCK + MENTIONS[0])]
    prompt = prompt_of("deepseek-v3.1", turns)
    assert runs("deepseek-v3.1", prompt) == [f"\n\n{MENTIONS[0]}<｜end▁of▁sentence｜>"]
    assert prompt.alterations == (Alteration.THINKING_HIDDEN,)


def test_reasoning_whose_opening_tag_is_in_the_generation_prompt() -> None:
    turns = [user("hello"), answer("add\n</think>\n\n4")]
    assert trained("qwen3-field", turns) == [f"{BLOCK}4<|im_end|>"]
    assert trained("qwen3-field", turns, ReadingOptions(training=Training(reasoning=False))) == [
        "4<|im_end|>"
    ]
    assert trained("smollm2", turns, ReadingOptions(training=Training(reasoning=False))) == [
        "4<|im_end|>"
    ]
    assert trained("smollm2", turns, ReadingOptions(thinking=Thinking.DROP)) == ["4<|im_end|>"]
    hidden = prompt_of("deepseek-r1", turns)
    assert hidden.alterations == (Alteration.THINKING_HIDDEN,)
    kept = prompt_of("deepseek-r1", turns, ReadingOptions(thinking=Thinking.KEEP))
    assert runs("deepseek-r1", kept) == ["add\n</think>\n\n4<｜end▁of▁sentence｜>"]


def test_an_ambiguous_closing_tag_fails_instead_of_being_guessed() -> None:
    turns = [user("hello"), answer("add.</think>4")]
    bad = read("qwen3-field", turns)
    assert isinstance(bad, BadRow)
    assert (bad.reason, "write that into reasoning_content" in bad.detail) == (
        RowReason.MASK_FAILED,
        True,
    )


@pytest.mark.parametrize("reasoning", ["4", "d", "I"])
@pytest.mark.parametrize("reply", ["4", "d", "im", "end"])
def test_a_short_answer_is_found_behind_its_reasoning(reasoning: str, reply: str) -> None:
    options = ReadingOptions(training=Training(reasoning=False))
    for name in ("qwen3", "glm", "gpt-oss"):
        end = {"qwen3": "<|im_end|>", "glm": "", "gpt-oss": "<|return|>"}[name]
        assert trained(name, [user("so?"), thoughtful(reply, reasoning)], options) == [reply + end]


@pytest.mark.parametrize("reply", ["4", "d"])
def test_a_hidden_short_thought_is_detected_even_if_the_answer_repeats_it(reply: str) -> None:
    turns = [user("hello"), thoughtful(reply, reply), user("so?"), answer("fine")]
    assert prompt_of("qwen3", turns).alterations == (Alteration.THINKING_HIDDEN,)
    bad = read("deepseek-r1", turns, ReadingOptions(thinking=Thinking.KEEP))
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.THINKING_LOST


# --- inputs of the template ---------------------------------------------------------------------


def test_template_kwargs_reach_the_template() -> None:
    options = ReadingOptions(template=TemplateOptions(kwargs={"enable_thinking": False}))
    assert trained("qwen3", PLAIN, options) == ["fine thanks<|im_end|>", "hm,\nyes<|im_end|>"]
    asked = prompt_of("qwen3", [user("hello")], options)
    assert text_of("qwen3", asked).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_another_template_may_be_given() -> None:
    options = ReadingOptions(
        template=TemplateOptions(text=SMOLLM2.replace("You are a helpful assistant.", "Hm."))
    )
    assert "system\nHm.<|im_end|>" in text_of("qwen3", prompt_of("qwen3", PLAIN, options))
    default = Renderer(TOKENIZERS["qwen3"]).template_digest
    assert Renderer(TOKENIZERS["qwen3"], options).template_digest != default


# --- tools --------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
TOOLS_EXPECTED = {
    "llama3": ['{"name": "w", "parameters": {"city": "Rom"}}<|eot_id|>', "rain<|eot_id|>"],
    "qwen3": [
        '<tool_call>\n{"name": "w", "arguments": {"city": "Rom"}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nrain<|im_end|>",
    ],
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n"
        '{"city":"Rom"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "rain<｜end▁of▁sentence｜>",
    ],
    "kimi-k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>"
        '{"city": "Rom"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "rain<|im_end|>",
    ],
    "glm": [
        "\n<think></think>\n<tool_call>w\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
        "</tool_call>",
        "\n<think></think>\nrain",
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "w", "arguments": {"city": "Rom"}, "id": "a1b2c3d4e"}]</s>',
        " rain</s>",
    ],
    "gpt-oss": [
        ' to=functions.w<|channel|>commentary json<|message|>{"city": "Rom"}<|call|>',
        "<|channel|>final<|message|>rain<|return|>",
    ],
}


@pytest.mark.parametrize("arguments", [{"city": "Rom"}, '{"city":"Rom"}'], ids=["object", "string"])
@pytest.mark.parametrize("name", TOOLS_EXPECTED)
def test_case_81_tool_calls_are_trained_whichever_form_their_arguments_have(
    name: str, arguments: Any
) -> None:
    call_id = "functions.w:0" if name == "kimi-k2" else "a1b2c3d4e"
    turns = [
        user("weather?"),
        answer(None, tool_calls=[call(arguments=arguments, call_id=call_id)]),
        result('{"sky": "rain"}', call_id),
        answer("rain"),
    ]
    prompt = prompt_of(name, turns)
    assert runs(name, prompt) == TOOLS_EXPECTED[name]
    # The one form that the template takes is rendered; a change of form is counted.
    is_text = isinstance(arguments, str)
    if name == "deepseek-v3":
        assert prompt.alterations == (() if is_text else (Alteration.ARGUMENTS_WRITTEN,))
    else:
        assert prompt.alterations == ((Alteration.ARGUMENTS_PARSED,) if is_text else ())


@pytest.mark.parametrize("name", [n for n in TOOLS_EXPECTED if n != "deepseek-v3"])
def test_tools_are_rendered(name: str) -> None:
    assert '"name": "w"' in text_of(name, prompt_of(name, PLAIN, tools=[TOOL]))


@pytest.mark.parametrize("name", ["smollm2", "gemma", "deepseek-r1", "generation"])
def test_a_template_that_knows_no_tools_fails_the_row(name: str) -> None:
    called = [user("weather?"), answer("", tool_calls=[call()])]
    for bad in (read(name, PLAIN, tools=[TOOL]), read(name, called)):
        assert isinstance(bad, BadRow)
        assert bad.reason == RowReason.RENDER_FAILED


@pytest.mark.parametrize("name", ["smollm2", "gemma", "deepseek-r1", "generation"])
def test_unsupported_tool_definitions_can_be_dropped_but_tool_calls_cannot(
    name: str,
) -> None:
    dropping = ReadingOptions(tools=Tools.DROP)
    prompt, plain = prompt_of(name, PLAIN, dropping, tools=[TOOL]), prompt_of(name, PLAIN)
    assert prompt.input_ids.tolist() == plain.input_ids.tolist()
    assert prompt.alterations == (Alteration.TOOLS_DROPPED,)
    assert prompt_of(name, PLAIN, dropping).alterations == ()
    bad = read(name, [user("hm"), answer("", tool_calls=[call()])], dropping, tools=[TOOL])
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.RENDER_FAILED


@pytest.mark.parametrize("name", [n for n in TOOLS_EXPECTED if n != "deepseek-v3"])
def test_supported_tool_definitions_are_not_dropped(name: str) -> None:
    dropping = ReadingOptions(tools=Tools.DROP)
    prompt, kept = (
        prompt_of(name, PLAIN, dropping, tools=[TOOL]),
        prompt_of(name, PLAIN, tools=[TOOL]),
    )
    assert prompt.input_ids.tolist() == kept.input_ids.tolist()
    assert prompt.alterations == ()


def test_a_call_that_the_template_leaves_out_fails_the_row() -> None:
    # Kimi's name comes from the id, and this id has none.
    bad = read("kimi-k2", [user("weather?"), answer(None, tool_calls=[call(call_id="c1")])])
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.MASK_FAILED


def test_content_beside_a_call_that_the_template_leaves_out_fails_the_row() -> None:
    bad = read("llama3", [user("weather?"), answer("one moment", tool_calls=[call()])])
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.MASK_FAILED


def test_a_part_of_the_history_that_the_template_leaves_out_fails_the_row() -> None:
    turns = [user("hm"), answer("one moment", tool_calls=[call()]), result("rain"), answer("rain")]
    bad = read("llama3", turns, ReadingOptions(training=Training(answers=Train.LAST)))
    assert isinstance(bad, BadRow)
    assert bad.reason == RowReason.RENDER_FAILED


def test_reasoning_before_calls_that_an_answer_follows() -> None:
    turns = [
        user("weather?"),
        answer(None, reasoning_content="look", tool_calls=[call()]),
        result("rain"),
        thoughtful("rain", "done"),
        user("thanks"),
        answer("fine"),
    ]
    # No turn before the last renders as it does alone, so stand-ins show where the turns are.
    assert trained("qwen3", turns) == [
        TOOLS_EXPECTED["qwen3"][0],
        "rain<|im_end|>",
        "<think>\n\n</think>\n\nfine<|im_end|>",
    ]
    assert trained("gpt-oss", turns) == [
        TOOLS_EXPECTED["gpt-oss"][0],
        "<|channel|>final<|message|>rain<|end|>",
        "<|channel|>final<|message|>fine<|return|>",
    ]


def test_several_calls_and_results_in_a_row() -> None:
    turns = [
        user("weather?"),
        answer("look", tool_calls=[call(), call("v", {"n": 3})]),
        result("rain"),
        result("sun"),
        answer("both"),
    ]
    assert trained("qwen3", turns) == [
        'look\n<tool_call>\n{"name": "w", "arguments": {"city": "Rom"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "v", "arguments": {"n": 3}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nboth<|im_end|>",
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_case_91_an_open_conversation_has_no_trained_token_after_its_question(
    name: str,
) -> None:
    prompt = prompt_of(name, [*PLAIN, user("and?")])
    answers = runs(name, prompt)
    assert len(answers) == 2
    assert "hm,\nyes" in answers[1]
    assert prompt.loss_mask[-1] == 0


texts = st.sampled_from(
    [
        *("", " ", "a", " b ", "<think>t</think>x", "</think>", "<|im_end|>", "é\n\n"),
        *("hello there", "t\n</think>\n\nx", "a `</think>` b", "<think>t</think>a `</think>` b"),
    ]
)
arguments = st.sampled_from([{}, {"a": 1}, {"a": "x\ny", "b": {"c": ["é"]}}, '{"a": 1}', "[", None])
calls = st.lists(
    st.builds(lambda a, i: {"id": i, "function": {"name": "w", "arguments": a}}, arguments, texts),
    max_size=2,
)
any_turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"])},
        optional={"content": texts, "reasoning": texts, "tool_calls": calls},
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=any_turns,
    thinking=st.sampled_from(list(Thinking)),
    train_thinking=st.booleans(),
    tools=st.sampled_from([[], [TOOL]]),
)
def test_whatever_the_turns_a_row_gives_a_prompt_or_a_reason(
    name: str, turns: Turns, thinking: Thinking, train_thinking: bool, tools: list[Any]
) -> None:
    options = ReadingOptions(thinking=thinking, training=Training(reasoning=train_thinking))
    item = read(name, [user("so?"), *turns], options, tools=tools)
    if isinstance(item, BadRow):
        return
    # What is trained holds the last thing that an assistant said.
    said = [turn for turn in turns if turn["role"] == "assistant" and turn.get("content")]
    assert item.has_answer == any(turn["role"] == "assistant" for turn in turns)
    if said and item.has_answer:
        answer_text = said[-1]["content"].rpartition("</think>")[2].strip()
        assert answer_text in "\n".join(runs(name, item))

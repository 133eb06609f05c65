"""Loss masks, spelled out as the text that is trained, on small equivalents of common templates."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import byte_level_bpe
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from prompts.inputs import RawRow
from prompts.render import Renderer
from prompts.types import BadRow, Prompt, RowOrigin, RowReason

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As older ChatML templates: knows no generation prompt.
CHATML_CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
#: Drops the reasoning of all turns but those after the last question, and gives those a block even
#: where they have none: no turn before the last renders as it does alone.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set reasoning = '' %}
{%- if '</think>' in m.content %}
{%- set reasoning = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
{{- content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
#: Opens the generation prompt with a tag that no finished turn has.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
#: No role header, and a space that belongs to the first word of the answer.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN_LABELS = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
#: As SmolLM3: the header and the line break are inside the block.
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|User|>", "<|Assistant|>", "[INST]", "[/INST]"),
)


TEXT = "assistant system user think hello there, how are you? fine  thanks\n\n\n\nUSER: "
BACKENDS = {
    trim: byte_level_bpe(TEXT, SPECIAL, vocab_size=400, trim_offsets=trim) for trim in (True, False)
}


def make_tokenizer(template: str, *, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=BACKENDS[trim_offsets],
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


TOKENIZERS = {
    template: make_tokenizer(template)
    for template in (
        *(CHATML, CHATML_CLOSED, LLAMA3, QWEN3, DEEPSEEK_R1, MISTRAL, PLAIN_LABELS, GENERATION),
    )
}


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def prompt_of(tokenizer: Any, turns: list[dict[str, str]]) -> Prompt | BadRow:
    row = RawRow(
        ordinal=0, origin=RowOrigin(source="a", line=1), data=orjson.dumps({"messages": turns})
    )
    return Renderer(tokenizer).prompt_from(row)


def trained(tokenizer: Any, turns: list[dict[str, str]]) -> list[str]:
    """The text of each run of trained tokens, after checking the ids against transformers'."""
    prompt = prompt_of(tokenizer, turns)
    assert isinstance(prompt, Prompt), prompt
    expected = tokenizer.apply_chat_template(
        turns, add_generation_prompt=turns[-1]["role"] != "assistant", return_dict=False
    )
    assert prompt.input_ids.tolist() == expected
    pairs = zip(prompt.loss_mask.tolist(), prompt.input_ids.tolist(), strict=True)
    return [
        tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False)
        for marked, run in groupby(pairs, key=lambda pair: pair[0])
        if marked
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["hello<|im_end|>", "fine,\nthanks<|im_end|>"]),
        (CHATML_CLOSED, ["hello<|im_end|>", "fine,\nthanks<|im_end|>"]),
        (LLAMA3, ["hello<|eot_id|>", "fine,\nthanks<|eot_id|>"]),
        (
            QWEN3,
            ["hello<|im_end|>", "<think>\n\n</think>\n\nfine,\nthanks<|im_end|>"],
        ),
        (DEEPSEEK_R1, ["hello</s>", "fine,\nthanks</s>"]),
        (MISTRAL, [" hello</s>", " fine,\nthanks</s>"]),
        (PLAIN_LABELS, [" hello</s>", " fine,\nthanks</s>"]),
        (GENERATION, ["hello<|im_end|>", "fine,\nthanks<|im_end|>"]),
    ],
    ids=["chatml", "chatml-closed", "llama3", "qwen3", "r1", "mistral", "labels", "generation"],
)
@pytest.mark.parametrize("trim_offsets", [True, False], ids=["trimmed", "whole"])
def test_the_answers_and_their_end_markers_are_trained_and_nothing_else(
    template: str, expected: list[str], trim_offsets: bool
) -> None:
    tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)
    turns = chat("hello there", "hello", "how are you?", "fine,\nthanks")
    assert trained(tokenizer, turns) == expected


def test_a_system_turn_is_not_trained() -> None:
    turns = chat("hi", "hello", system="assistant user hello")
    assert trained(TOKENIZERS[CHATML], turns) == ["hello<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, QWEN3, DEEPSEEK_R1, MISTRAL, GENERATION])
def test_where_the_user_has_the_last_word_the_generation_prompt_is_not_trained(
    template: str,
) -> None:
    turns = chat("hello", "fine", "and you?")
    (only,) = trained(TOKENIZERS[template], turns)
    assert only.strip() in {"fine<|im_end|>", "fine</s>"}


def test_a_row_without_an_answer_is_a_prompt_with_an_empty_mask() -> None:
    prompt = prompt_of(TOKENIZERS[CHATML], chat("hello"))
    assert isinstance(prompt, Prompt)
    assert prompt.num_trained == 0


def test_an_answer_that_repeats_the_question_is_found_in_its_own_turn() -> None:
    for template in (CHATML, CHATML_CLOSED, QWEN3):
        runs = trained(TOKENIZERS[template], chat("hi", "hi", "hi", "hi", "hi"))
        assert runs == ["hi<|im_end|>"] * 2


def test_two_answers_in_a_row_are_both_trained() -> None:
    turns = [*chat("hi", "hello"), {"role": "assistant", "content": "there"}]
    assert trained(TOKENIZERS[CHATML], turns) == ["hello<|im_end|>", "there<|im_end|>"]


def test_a_tool_answer_is_not_trained() -> None:
    turns = [*chat("hi", "fine"), {"role": "tool", "content": "7"}]
    turns.append({"role": "assistant", "content": "seven"})
    assert trained(TOKENIZERS[CHATML], turns) == ["fine<|im_end|>", "seven<|im_end|>"]


def test_reasoning_that_the_template_drops_is_not_trained_and_what_it_keeps_is() -> None:
    turns = chat("hi", "<think>\nhow\n</think>\n\nhello", "and?", "<think>\nso\n</think>\n\nfine")
    assert trained(TOKENIZERS[QWEN3], turns) == [
        "hello<|im_end|>",
        "<think>\nso\n</think>\n\nfine<|im_end|>",
    ]
    assert trained(TOKENIZERS[DEEPSEEK_R1], turns) == ["\n\nhello</s>", "\n\nfine</s>"]


def test_spaces_and_line_breaks_around_an_answer_are_its_own() -> None:
    assert trained(TOKENIZERS[CHATML], chat("hi", "  hello \n")) == ["  hello \n<|im_end|>"]
    assert trained(TOKENIZERS[LLAMA3], chat("hi", "  hello \n")) == ["hello<|eot_id|>"]


def test_characters_of_several_tokens_are_trained_whole() -> None:
    runs = trained(TOKENIZERS[CHATML], chat("né 🦜", "🦜né漢", "漢", "é"))
    assert runs == ["🦜né漢<|im_end|>", "é<|im_end|>"]


def test_an_end_marker_that_swallows_the_line_break_is_trained() -> None:
    # As in Phi-3: the marker strips what follows it, so its token reaches over the turn's end.
    backend = Tokenizer.from_str(BACKENDS[True].to_str())
    backend.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    template = CHATML.replace("<|im_end|>", "<|end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    assert trained(tokenizer, chat("hi", "hello", "so?", "fine")) == ["hello<|end|>", "fine<|end|>"]


def test_a_block_that_begins_with_a_space_does_not_end_the_mask() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    runs = trained(make_tokenizer(template), chat("hi", "hello", "so?", "fine"))
    assert runs == [" hello</s>", " fine</s>"]


def refusal(template: str, turns: list[dict[str, str]]) -> tuple[RowReason, str]:
    row = prompt_of(make_tokenizer(template), turns)
    assert isinstance(row, BadRow), row
    return row.reason, row.detail


def test_a_template_that_rewrites_an_answer_fails_the_row() -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
    assert refusal(template, chat("HI", "hello")) == (
        RowReason.MASK_FAILED,
        "turn 1 (assistant): its content is not where it should be",
    )


def test_a_template_that_writes_an_answer_twice_is_never_guessed_at() -> None:
    template = CHATML_CLOSED.replace("{{ m.content }}", "{{ m.content }}|{{ m.content }}")
    assert refusal(template, chat("hi", "hello")) == (
        RowReason.MASK_FAILED,
        "turn 1 (assistant): cannot prove where it lies in the rendering",
    )


def test_a_template_that_marks_only_some_answers_fails_the_row() -> None:
    template = GENERATION.replace("{% if m.role == 'assistant' %}", "{% if loop.last %}")
    reason, detail = refusal(template, chat("hi", "hello", "so?", "fine"))
    assert (reason, detail) == (
        RowReason.MASK_FAILED,
        "1 generation blocks for 2 assistant turns",
    )


@pytest.mark.parametrize(
    ("template", "verb"),
    [
        # The header tells the answer's length, so no stand-in shows where the answer begins.
        (CHATML_CLOSED.replace("{{ m.role }}", "{{ m.role }} {{ m.content | length }}"), "begins"),
        # The tail tells the first answer's length, so no stand-in shows where that answer ends.
        (QWEN3 + "{{ messages[1].content | length if messages | length > 2 }}", "ends"),
        # The last answer ends with another marker than the ones before it, which is no one token.
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            "{{ '</s>' if loop.last else '; ' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "ends",
        ),
    ],
    ids=["header", "tail", "marker"],
)
def test_a_border_that_cannot_be_proven_fails_the_row(template: str, verb: str) -> None:
    assert refusal(template, chat("hi", "fine", "so?", "hello")) == (
        RowReason.MASK_FAILED,
        f"turn 1 (assistant): cannot prove where it {verb} in the rendering",
    )


class OwnRendering(PreTrainedTokenizerFast):
    """A tokenizer that does more than its template says, as some models bring."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return super().apply_chat_template(*args, **kwargs) + "!"


def test_blocks_of_a_template_that_did_not_write_the_text_are_not_believed() -> None:
    tokenizer = OwnRendering(tokenizer_object=BACKENDS[True], chat_template=GENERATION)
    row = prompt_of(tokenizer, chat("hi", "hello"))
    assert isinstance(row, BadRow)
    assert (row.reason, "renders differently" in row.detail) == (RowReason.MASK_FAILED, True)


class WithoutOffsets:
    """A tokenizer in Python, as some models bring: it cannot say where its tokens lie."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return self._tokenizer(text, **kwargs)


def test_a_tokenizer_without_offsets_gives_the_same_masks() -> None:
    turns = chat("hello there", "hello", "how are you?", "fine 🦜", system="hi")
    for template in (CHATML, QWEN3, DEEPSEEK_R1):
        tokenizer = TOKENIZERS[template]
        assert trained(WithoutOffsets(tokenizer), turns) == trained(tokenizer, turns)


def test_without_offsets_a_token_across_a_border_fails_the_row() -> None:
    # The answer's first line break melts into one token with the header's.
    turns = chat("hi", "\n\nhello")
    row = prompt_of(WithoutOffsets(make_tokenizer(CHATML)), turns)
    assert isinstance(row, BadRow)
    assert row.reason == RowReason.MASK_FAILED
    assert trained(TOKENIZERS[CHATML], turns) == ["\nhello<|im_end|>"]


fragments = st.sampled_from(
    [
        *("a", "b", " ", ".", ":", "\n", "é", "🦜", "user", "assistant\n", " hi", "standin"),
        *("<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n", "</think>"),
    ]
)
contents = st.lists(fragments, min_size=1, max_size=12).map("".join).filter(str.strip)


@settings(deadline=None)
@given(
    st.sampled_from([CHATML, CHATML_CLOSED, GENERATION]), st.lists(contents, min_size=2, max_size=7)
)
def test_what_is_trained_is_each_answer_with_its_marker_whatever_the_turns_say(
    template: str, texts: list[str]
) -> None:
    runs = trained(TOKENIZERS[template], chat(*texts))
    answers = [text + "<|im_end|>" for text in texts[1::2]]
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        # Line breaks at the start may share a token with the header's, which is then not trained.
        assert answer.endswith(run)
        assert not answer.removesuffix(run).strip("\n ")

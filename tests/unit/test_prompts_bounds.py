"""The cost of a row is bounded: in tokenised characters, in renderings, and in bytes."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from templates import LLAMA3, QWEN3, tokenizer_for
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from prompts import token_bound
from prompts.dialects import count_parts, decode_row, label_of
from prompts.inputs import RawRow, read_rows, scan_inputs
from prompts.reading_options import ReadingOptions, Thinking
from prompts.render import Renderer
from prompts.token_bound import TokenBound, parse_json
from prompts.types import BadRow, Prompt, RowError, RowOrigin, RowReason

WORDS = "one two three four five six seven "


def raw(row: dict[str, Any]) -> RawRow:
    return RawRow(ordinal=0, origin=RowOrigin(source="a", line=1), data=orjson.dumps(row))


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
    }


def refusal(renderer: Renderer, row: dict[str, Any]) -> tuple[RowReason, str]:
    bad = renderer.prompt_from(raw(row))
    assert isinstance(bad, BadRow), bad
    return bad.reason, bad.detail


def watched(renderer: Renderer) -> dict[str, int]:
    """Count the characters that the renderer tokenises, and its renderings."""
    tokenizer: Any = renderer.tokenizer
    counts = {"characters": 0, "renderings": 0}
    encode, render = tokenizer._encode_fast, tokenizer._hf.apply_chat_template

    def encoding(text: str) -> Any:
        counts["characters"] += len(text)
        return encode(text)

    def rendering(*args: Any, **options: Any) -> Any:
        counts["renderings"] += 1
        return render(*args, **options)

    tokenizer._encode_fast = encoding
    tokenizer._hf.apply_chat_template = rendering
    return counts


# --- levels -----------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


@pytest.mark.parametrize("kind", [str, str.encode])
def test_json_may_be_nested_to_the_bound_and_no_deeper(kind: Callable[[str], Any]) -> None:
    wide = "[" + ",".join(["[{}]"] * 200) + "]"
    assert parse_json(kind(wide)) == [[{}]] * 200
    assert parse_json(kind(nested(token_bound.MAX_LEVELS))) is not None
    with pytest.raises(RowError, match="row_too_large: nested deeper than 100 levels"):
        parse_json(kind(nested(token_bound.MAX_LEVELS + 1)))


#: Within orjson's own limit, and beyond it.
LEVELS = (900, 40_000)
ASKED = '{"role": "user", "content": "a"}'


@pytest.mark.parametrize(
    "row",
    [
        '{"text": "a", "other": DEEP}',
        '{"question": DEEP, "problem": DEEP}',
        f'{{"messages": [{ASKED}, DEEP]}}',
        '{"messages": "DEEP"}',
        f'{{"messages": [{ASKED}], "tools": "DEEP"}}',
        f'{{"messages": [{ASKED}], "metadata": "{{\\"tools\\": DEEP}}"}}',
        f'{{"messages": [{ASKED}, {{"role": "assistant", "content": "", "tool_calls": "DEEP"}}]}}',
    ],
)
@pytest.mark.parametrize("levels", LEVELS)
def test_a_row_that_is_nested_too_deeply_fails_alone(row: str, levels: int) -> None:
    data = row.replace("DEEP", nested(levels)).encode()
    bad, good = Renderer(tokenizer_for(QWEN3)).prompts_from(
        [RawRow(ordinal=0, origin=RowOrigin(source="a", line=1), data=data), raw(chat("a", "b"))]
    )
    assert isinstance(bad, BadRow) and isinstance(good, Prompt)
    assert bad.reason == RowReason.ROW_TOO_LARGE


# --- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"text": WORDS * 30_000},
        chat(WORDS * 30_000, "ok"),
        chat("hi", WORDS * 30_000),
        chat(*[WORDS * 3_000] * 10),
        {"messages": chat("hi", "ok")["messages"], "tools": [{"name": "f", "x": WORDS * 30_000}]},
    ],
    ids=["text", "question", "answer", "turns", "tools"],
)
def test_a_row_that_is_far_too_long_is_not_tokenised_to_its_end(row: dict[str, Any]) -> None:
    renderer = Renderer(tokenizer_for(QWEN3), bound=TokenBound(max_tokens=1000))
    counts = watched(renderer)
    assert refusal(renderer, row) == (RowReason.TOO_LONG, "more than 2000 tokens")
    assert counts["characters"] < 50_000  # of a million
    assert counts["renderings"] <= (2 if "tools" in row else 0)


@pytest.mark.parametrize("num_tokens", [1990, 2010, 4100])
def test_only_the_token_count_decides_whether_a_row_fits(num_tokens: int) -> None:
    renderer = Renderer(tokenizer_for(QWEN3), bound=TokenBound(max_tokens=1000))
    whole = Renderer(tokenizer_for(QWEN3)).prompt_from(raw({"text": "1 2 3 4 " * 2000}))
    assert isinstance(whole, Prompt)
    per_word = whole.num_tokens / 8000
    item = renderer.prompt_from(raw({"text": "1 " * int(num_tokens / per_word)}))
    assert isinstance(item, Prompt)  # the text is so short that it is tokenised without a check
    assert abs(item.num_tokens - num_tokens) < 20


def test_a_row_of_very_many_turns_is_not_rendered() -> None:
    renderer = Renderer(tokenizer_for(QWEN3), bound=TokenBound(max_tokens=1000))
    counts = watched(renderer)
    assert refusal(renderer, chat(*["a"] * 2001))[0] == RowReason.TOO_LONG
    assert counts == {"characters": 0, "renderings": 0}


def test_a_text_of_few_and_long_tokens_is_not_tokenised_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = TokenBound(max_tokens=1000, max_whole_chars=100_000)
    renderer = Renderer(tokenizer_for(QWEN3), bound=bound)
    assert renderer.tokenizer is not None
    monkeypatch.setattr(renderer.tokenizer, "has_more_tokens", lambda texts, num_tokens: False)
    assert isinstance(renderer.prompt_from(raw({"text": "a " * 50_000})), Prompt)
    assert refusal(renderer, {"text": "a " * 50_001})[0] == RowReason.ROW_TOO_LARGE


def without_words() -> PreTrainedTokenizerFast:
    """A tokenizer like that of Llama 2: a text is one word, and spaces become a letter."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Metaspace()
    corpus = [word for word in WORDS.split() for _ in range(9)]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(  # type: ignore[no-untyped-call]
            vocab_size=300, special_tokens=["<unk>", "</s>"]
        ),
    )
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", chat_template=template
    )


TEXTS = {
    "words": WORDS,
    "spaces": "one      two\n\n   \t three  ",
    "signs": "naïve 漢字仮名🙂🙂 e\u0301 don't 1234567 --==--  ",
    "lines": "one\r\n\r\ntwo \n",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "made",
    [lambda: tokenizer_for(QWEN3), lambda: tokenizer_for(LLAMA3), without_words],
    ids=["qwen3", "llama3", "without-words"],
)
def test_a_tokenised_beginning_equals_that_of_the_whole_text(
    made: Callable[[], PreTrainedTokenizerFast], text: str
) -> None:
    rows = [
        {"text": text * 2000},
        chat(text * 1000, "ok"),
        chat(*(f"{text}{number}" for number in range(400))),
        chat("hi", f"x{text * 2000}x"),
    ]
    whole, bounded = Renderer(made()), Renderer(made())
    for max_tokens in (100, 101, 257):
        bounded.bound = TokenBound(max_tokens=max_tokens, keeps_beginning=True)
        counts = watched(bounded)
        for row in rows:
            expected, found = whole.prompt_from(raw(row)), bounded.prompt_from(raw(row))
            assert isinstance(expected, Prompt) and isinstance(found, Prompt), (expected, found)
            assert expected.num_tokens > found.num_tokens > max_tokens
            expected, found = expected.cut(max_tokens), found.cut(max_tokens)
            assert np.array_equal(found.input_ids, expected.input_ids)
            assert np.array_equal(found.loss_mask, expected.loss_mask)
            assert (found.has_answer, found.label) == (expected.has_answer, expected.label)
        assert counts["characters"] < 64 * max_tokens * len(rows)


def test_a_text_without_words_is_kept_whole_or_fails() -> None:
    bound = TokenBound(max_tokens=100, keeps_beginning=True)
    renderer = Renderer(tokenizer_for(QWEN3), bound=bound)
    row = {"text": "x" * 20_000}
    prompt = renderer.prompt_from(raw(row))
    assert isinstance(prompt, Prompt) and len(row["text"]) == 20_000
    assert renderer.tokenizer is not None
    assert renderer.tokenizer.decode(prompt.input_ids.tolist()) == row["text"]
    renderer.bound = replace(bound, max_whole_chars=10_000)
    reason, detail = refusal(renderer, row)
    assert (reason, "cut it before" in detail) == (RowReason.TOO_LONG, True)


# --- turns ------------------------------------------------------------------------------------


def test_plain_answers_are_located_without_a_rendering_for_each() -> None:
    renderer = Renderer(tokenizer_for(LLAMA3))
    counts = watched(renderer)
    prompt = renderer.prompt_from(raw(chat(*["a", "b"] * 1000)))
    assert isinstance(prompt, Prompt)
    assert counts["renderings"] == 1
    ends = prompt.num_trained // 2
    assert ends == 1000  # `b` and the end marker


def test_answers_that_take_a_rendering_each_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(tokenizer_for(QWEN3))
    counts = watched(renderer)
    turns = chat(*["a", "<think>\nx\n</think>\n\nb"] * 20)
    monkeypatch.setattr("prompts.assistant_spans.MAX_TURNS_RENDERED", 20 * 40)
    assert isinstance(renderer.prompt_from(raw(turns)), Prompt)
    assert counts["renderings"] > 20
    monkeypatch.setattr("prompts.assistant_spans.MAX_TURNS_RENDERED", 20 * 40 - 1)
    counts["renderings"] = 0
    reason, detail = refusal(renderer, turns)
    assert (reason, "20 answers among 40 turns" in detail) == (RowReason.ROW_TOO_LARGE, True)
    assert counts["renderings"] == 1


def test_a_row_that_expands_to_too_much_counts_once_and_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ReadingOptions(thinking=Thinking.EXPAND)
    data = orjson.dumps(chat(*["a", "b"] * 20))
    assert count_parts(data, options) == 20
    monkeypatch.setattr("prompts.dialects.MAX_EXPANDED_BYTES", 20 * len(data) - 1)
    assert count_parts(data, options) == 1
    row = RawRow(ordinal=0, origin=RowOrigin(source="a", line=1, part=0), data=data)
    bad = Renderer(tokenizer_for(QWEN3), options).prompt_from(row)
    assert isinstance(bad, BadRow) and bad.reason == RowReason.ROW_TOO_LARGE


# --- what is kept of a row --------------------------------------------------------------------


def test_an_overlong_label_is_cut() -> None:
    assert label_of({"id": "x" * 1000}) == f'"{"x" * 1000}"'
    assert label_of({"id": "x" * 1001}) == f'"{"x" * 1000}…"'


# --- columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "parquet-plain", "arrow"])
def test_a_large_value_of_a_column_format_fails_its_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A value that is stored once may be the value of every row."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("prompts.token_bound.MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr("prompts.arrow.BATCH_BYTES", 8 << 20)
    values = pa.array(["x" * (4 << 20), "small"])
    text = pa.DictionaryArray.from_arrays(pa.array([1, *[0] * 60, 1], pa.int32()), values)
    table = pa.table({"text": text})
    sink = io.BytesIO()
    if kind == "arrow":
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, sink, compression="zstd", store_schema=kind == "parquet")
    path = tmp_path / "a"
    path.write_bytes(sink.getvalue())
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        rows = []
        for row in read_rows(scan_inputs([path])):
            rows.append(row)
            assert pa.total_allocated_bytes() - before < 32 << 20  # all rows: 240 MiB
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert [row.origin.line for row in rows] == list(range(1, 63))
    assert [decode_row(row.data) for row in (rows[0], rows[-1])] == [{"text": "small"}] * 2
    assert [row.data for row in rows[1:-1]] == [token_bound.OVERSIZED] * 60

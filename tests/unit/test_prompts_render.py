"""From rows to prompts: what is rendered and tokenised, what is refused, what digests cover."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from prompt_files import read_prompts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prompts.inputs import RawRow, scan_inputs
from prompts.render import Renderer
from prompts.types import Alteration, BadRow, Prompt, RowOrigin, RowReason, TokenizerError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(
    template: str | None = TEMPLATE,
    *,
    extra: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """One token for each byte, what `merges` makes of them, and the special ones."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [
        "<s>",
        "</s>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        *([extra] if extra else []),
    ]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def raw(row: dict[str, Any] | bytes, *, ordinal: int = 4, line: int = 7) -> RawRow:
    data = row if isinstance(row, bytes) else orjson.dumps(row)
    return RawRow(ordinal=ordinal, origin=RowOrigin(source="a.jsonl", line=line), data=data)


def prompt_of(renderer: Renderer, row: dict[str, Any]) -> Prompt:
    prompt = renderer.prompt_from(raw(row))
    assert isinstance(prompt, Prompt), prompt
    return prompt


def refusal(renderer: Renderer, row: dict[str, Any] | bytes) -> tuple[RowReason, str]:
    bad = renderer.prompt_from(raw(row))
    assert isinstance(bad, BadRow), bad
    return bad.reason, bad.detail


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}


def test_a_prompt_knows_where_it_comes_from() -> None:
    prompt = prompt_of(Renderer(make_tokenizer()), {"id": "x", **CHAT})
    assert (prompt.ordinal, str(prompt.origin), prompt.label) == (4, "a.jsonl:7", '"x"')


def test_so_does_a_row_without_a_prompt() -> None:
    bad = Renderer(make_tokenizer()).prompt_from(raw({"id": 3}))
    assert isinstance(bad, BadRow)
    assert (bad.ordinal, str(bad.origin), bad.label) == (4, "a.jsonl:7", "3")
    assert bad.reason == RowReason.UNKNOWN_SHAPE


def test_a_conversation_is_tokenised_once_with_one_bos() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_of(Renderer(tokenizer), CHAT).input_ids
    assert tokenizer.decode(ids.tolist()) == "<s><|user|>Hi</s><|assistant|>Yo</s>"


def test_where_the_user_has_the_last_word_the_model_is_asked_to_answer() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_of(Renderer(tokenizer), {"messages": CHAT["messages"][:1]}).input_ids
    assert tokenizer.decode(ids.tolist()) == "<s><|user|>Hi</s><|assistant|>"


def test_a_text_is_tokenised_as_it_is_and_trained_throughout() -> None:
    tokenizer = make_tokenizer()
    prompt = prompt_of(Renderer(tokenizer), {"text": "<|user|>Hi</s>"})
    tokens = tokenizer.convert_ids_to_tokens(prompt.input_ids.tolist())
    assert tokens == ["<|user|>", "H", "i", "</s>"]
    assert prompt.loss_mask.tolist() == [1, 1, 1, 1]


def test_ids_keep_their_mask_and_have_ones_where_there_is_none() -> None:
    renderer = Renderer(make_tokenizer())
    prompt = prompt_of(renderer, {"input_ids": [3, 2, 1], "loss_mask": [0, 1, 0]})
    assert (prompt.input_ids.tolist(), prompt.loss_mask.tolist()) == ([3, 2, 1], [0, 1, 0])
    assert prompt_of(renderer, {"input_ids": [3, 2]}).loss_mask.tolist() == [1, 1]


def test_without_a_tokenizer_ids_are_read_and_the_rest_says_what_is_missing() -> None:
    renderer = Renderer()
    assert prompt_of(renderer, {"input_ids": [3]}).num_tokens == 1
    for row in (CHAT, {"text": "Hi"}):
        assert refusal(renderer, row) == (
            RowReason.RENDER_FAILED,
            "needs a tokenizer: pass --tokenizer",
        )
    assert (renderer.tokenizer_digest, renderer.template_digest) == ("none", "none")
    assert renderer.vocab_size is None


def test_without_a_chat_template_texts_are_read_and_conversations_refused() -> None:
    renderer = Renderer(make_tokenizer(None))
    assert prompt_of(renderer, {"text": "Hi"}).num_tokens == 2
    reason, detail = refusal(renderer, CHAT)
    assert reason == RowReason.RENDER_FAILED
    assert "no chat template" in detail
    assert renderer.template_digest == "none"


def test_a_template_s_own_complaint_is_passed_on() -> None:
    renderer = Renderer(make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    reason, detail = refusal(renderer, CHAT)
    assert reason == RowReason.RENDER_FAILED
    assert "roles must alternate" in detail


@pytest.mark.parametrize("role", ["system", "tool", "user"])
def test_a_template_that_leaves_out_a_turn_fails_the_row(role: str) -> None:
    template = TEMPLATE.replace(
        "{% for m in messages %}", "{% for m in messages if m.content != 'lost' %}"
    )
    turns = [*CHAT["messages"], {"role": role, "content": "lost"}]
    assert refusal(Renderer(make_tokenizer(template)), {"messages": turns}) == (
        RowReason.RENDER_FAILED,
        f"turn 2 ({role}) is not in the rendering: the template left it out",
    )


def test_a_turn_that_says_what_another_says_does_not_hide_its_loss() -> None:
    template = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages[:2] %}")
    turns = [*CHAT["messages"], {"role": "user", "content": "Hi"}]
    reason, detail = refusal(Renderer(make_tokenizer(template)), {"messages": turns})
    assert (reason, detail[:13]) == (RowReason.RENDER_FAILED, "turn 2 (user)")


def test_a_system_turn_may_be_moved_to_the_front_and_hides_no_loss_either() -> None:
    system = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    others = "{% for m in messages if m.role != 'system' %}"
    turns = [*CHAT["messages"], {"role": "system", "content": "S"}, CHAT["messages"][0]]
    whole = TEMPLATE.replace("{% for m in messages %}", system + others)
    assert prompt_of(Renderer(make_tokenizer(whole)), {"messages": turns}).num_trained == 3
    cut = whole.replace(others, others.replace("messages", "messages[:2]"))
    reason, detail = refusal(Renderer(make_tokenizer(cut)), {"messages": turns})
    assert (reason, detail[:13]) == (RowReason.RENDER_FAILED, "turn 3 (user)")


def test_a_tool_answer_written_as_json_is_not_taken_for_lost() -> None:
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content | tojson }}")
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "tool", "content": 'say "no"\n'},
    ]
    assert prompt_of(Renderer(make_tokenizer(template)), {"messages": turns}).num_trained == 0


def test_two_bos_tokens_fail_the_row() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("{{ bos_token }}" + TEMPLATE, CHAT),
        (TEMPLATE, {"text": "<s><s>Hi"}),
    ]
    for template, row in cases:
        reason, detail = refusal(Renderer(make_tokenizer(template)), row)
        assert reason == RowReason.RENDER_FAILED
        assert "two BOS tokens" in detail


@pytest.mark.parametrize(
    "row", [b"", b"{", b"[]", b'{"text":"\\ud800"}', b'{"messages":[{"role":"user"}]}', b"\xff"]
)
def test_no_row_raises(row: bytes) -> None:
    assert isinstance(Renderer(make_tokenizer()).prompt_from(raw(row)), BadRow)


def test_the_tokenizer_digest_covers_the_vocabulary_and_not_how_it_was_used() -> None:
    tokenizer = make_tokenizer()
    digest = Renderer(tokenizer).tokenizer_digest
    tokenizer(["a", "abc"], padding=False, truncation=True, max_length=2)
    assert Renderer(tokenizer).tokenizer_digest == digest
    assert Renderer(make_tokenizer()).tokenizer_digest == digest
    assert Renderer(make_tokenizer(extra="<|x|>")).tokenizer_digest != digest


def test_the_template_digest_covers_the_template() -> None:
    digest = Renderer(make_tokenizer()).template_digest
    assert len(digest) == 32
    assert Renderer(make_tokenizer(TEMPLATE + " ")).template_digest != digest


def test_the_vocabulary_size_counts_added_tokens() -> None:
    assert Renderer(make_tokenizer()).vocab_size == 256 + 5


def test_a_saved_model_folder_gives_the_same_prompts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded, given = Renderer.load(str(tmp_path)), Renderer(tokenizer)
    assert loaded.template_digest == given.template_digest
    assert prompt_of(loaded, CHAT).key == prompt_of(given, CHAT).key


def test_a_folder_that_holds_no_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such folder"):
        Renderer.load(str(tmp_path / "none"))
    with pytest.raises(TokenizerError, match="tokenizer files") as caught:
        Renderer.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "Rows of ids need none: --tokenizer none" in str(caught.value)


def test_an_empty_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    # What transformers makes of a Qwen3 folder with a config.json and no tokenizer files.
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="knows no words: check that its tokenizer files"):
        Renderer.load(str(tmp_path))


def test_a_tokenizer_that_is_code_of_the_model_is_not_run_unasked(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit")
    with pytest.raises(TokenizerError, match="code that comes with the model"):
        Renderer.load(str(tmp_path))


def test_a_missing_jinja2_stops_the_run_and_not_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_chat_template(*args: Any, **kwargs: Any) -> str:
        raise ImportError("apply_chat_template requires jinja2")

    tokenizer = make_tokenizer()
    monkeypatch.setattr(tokenizer, "apply_chat_template", apply_chat_template)
    with pytest.raises(TokenizerError, match="chat templates need jinja2"):
        Renderer(tokenizer)


def test_transformers_is_not_imported_before_a_tokenizer_is_loaded() -> None:
    program = "import sys, prompts.stream; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


def test_a_stream_yields_every_row_that_is_not_skipped_once_and_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'{"text":"a"}\n\n{"text":"b"}\n{\n')
    second.write_bytes(b'{"text":"c"}\n{"text":"d"}')
    files = scan_inputs([first, second])
    renderer = Renderer(make_tokenizer())
    rows = list(read_prompts(files, renderer))
    assert [(row.ordinal, row.origin.line) for row in rows] == [
        (0, 1),
        (1, 3),
        (2, 4),
        (3, 1),
        (4, 2),
    ]
    assert [row.ordinal for row in rows if isinstance(row, BadRow)] == [2]
    resumed = read_prompts(files, renderer, skip={1, 2, 3}.__contains__)
    assert [row.ordinal for row in resumed] == [0, 4]


def test_a_skipped_row_is_not_even_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"a"}\n' * 3)
    renderer = Renderer(make_tokenizer())
    monkeypatch.setattr(Renderer, "prompt_from", None)
    assert not list(read_prompts(scan_inputs([path]), renderer, skip=lambda ordinal: True))


def test_an_answer_whose_first_token_begins_in_the_generation_prompt_is_counted() -> None:
    template = TEMPLATE.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n").replace(
        "<|assistant|>", "<|assistant|>\n"
    )
    renderer = Renderer(make_tokenizer(template, merges=(("Ċ", "Ċ"),)))

    def conversation(answer: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        return {"messages": turns}

    whole = prompt_of(renderer, conversation("bc"))
    assert (whole.num_trained, whole.alterations) == (3, ())
    split = prompt_of(renderer, conversation("\n\n bc"))
    # One line break of the two is in the token that the header ends with.
    assert split.num_trained == len("\n bc") + 1
    assert split.alterations == (Alteration.ANSWER_START_UNTRAINED,)

"""A chat template gets the same inputs besides its row in every process, time zone and session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from templates import QWEN3, tokenizer_for

from prompts import ambient
from prompts.ambient import clock_at, draws_at_random, parse_moment
from prompts.conversation_parser import ChatTurn
from prompts.inputs import RawRow
from prompts.reading_options import ReadingOptions, TemplateOptions
from prompts.render import Renderer
from prompts.tokenizer import RANDOM_FAULT, check_template
from prompts.types import BadRow, InputError, Prompt, RowOrigin, RowReason, TokenizerError

NEW_YEAR = "1999-12-31T23:59:58+05:30"
CLOCK = "{{ strftime_now('%d %b %Y %H:%M:%S') }}"
ROW = RawRow(
    ordinal=0,
    origin=RowOrigin(source="a", line=1),
    data=b'{"prompt": "hi", "completion": "a"}',
)


@pytest.fixture(params=["UTC", "Asia/Tokyo", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("%d %b %Y", "31 Dec 1999"),
        ("%Y-%m-%d %H:%M:%S.%f", "1999-12-31 23:59:58.000000"),
        ("%A %B %p", "Friday December PM"),
        ("%s %%s", "946664998 %s"),
        ("[%Z%z]", "[]"),  # as of a local time, which transformers gives
    ],
)
def test_a_frozen_clock_gives_the_same_time_in_every_time_zone(
    zone: str, format: str, expected: str
) -> None:
    assert clock_at(parse_moment(NEW_YEAR))(format) == expected


def test_a_time_without_an_offset_is_utc_in_every_time_zone(zone: str) -> None:
    assert parse_moment("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert parse_moment("2026-01-31T12:00:00.25Z").isoformat() == "2026-01-31T12:00:00+00:00"
    assert ambient.current_moment().utcoffset() is not None
    with pytest.raises(InputError, match=r"^'today' is not an ISO 8601 time: write it as 2026-"):
        parse_moment("today")


def test_a_template_gets_the_frozen_time_wherever_it_is_rendered() -> None:
    template = CLOCK + (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}"
    )
    renderer = Renderer(
        tokenizer_for(template),
        ReadingOptions(template=TemplateOptions(now=parse_moment(NEW_YEAR))),
    )
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    assert renderer.now == NEW_YEAR
    turns = [ChatTurn(role="assistant", content="fine")]
    text = tokenizer.render(turns, generation_prompt=False)
    assert text == "31 Dec 1999 23:59:58assistant:fine"
    (span,) = tokenizer.generation_spans(turns, text, generation_prompt=False)
    assert text[slice(*span)] == "fine"


def test_without_a_set_time_the_clock_is_frozen_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = Renderer(tokenizer_for(CLOCK + QWEN3))
    first = renderer.prompt_from(ROW)
    monkeypatch.setattr(ambient, "current_moment", lambda: parse_moment(NEW_YEAR))
    second = renderer.prompt_from(ROW)
    assert isinstance(first, Prompt) and isinstance(second, Prompt)
    assert first.key == second.key
    assert renderer.now == str(renderer.options.template.now).replace(" ", "T")


def test_a_template_without_a_clock_has_no_time() -> None:
    options = ReadingOptions(template=TemplateOptions(now=parse_moment(NEW_YEAR)))
    assert Renderer(tokenizer_for(QWEN3), options).now is None
    assert Renderer(options=options).now is None


RANDOM = ["{{ [1, 2] | random }}", "{{ lipsum() }}", "{{ [[1, 2]] | map( 'random') | list }}",
          "{% filter random %}ab{% endfilter %}", "{% set x = [1]|random %}"]  # fmt: skip


@pytest.mark.parametrize("template", RANDOM)
def test_a_template_that_draws_at_random_gives_no_prompt(template: str) -> None:
    assert draws_at_random(template)
    bad = Renderer(tokenizer_for(template + QWEN3)).prompt_from(ROW)
    assert isinstance(bad, BadRow)
    assert (bad.reason, bad.detail) == (
        RowReason.RENDER_FAILED,
        f"chat template: {RANDOM_FAULT}",
    )
    with pytest.raises(TokenizerError, match="draws random values"):
        check_template(template + QWEN3)


@pytest.mark.parametrize(
    "template",
    [QWEN3, "a | random lipsum", "{{ random }}", "{{ m.lipsum }}", "{{ m['random'] }}",
     "{# [1] | random #}", "{{ 'x' | trim }}", "{% generation %}{% endgeneration %}"],
)  # fmt: skip
def test_a_template_that_only_mentions_random_words_is_accepted(template: str) -> None:
    assert not draws_at_random(template)


PROGRAM = """
import json, sys
from datetime import datetime
from prompts.inputs import RawRow
from prompts.types import RowOrigin
from prompts.reading_options import ReadingOptions, TemplateOptions
from prompts.render import Renderer
template = TemplateOptions(now=datetime.fromisoformat(sys.argv[2]))
renderer = Renderer.load(sys.argv[1], ReadingOptions(template=template))
origin = RowOrigin(source="a", line=1)
prompt = renderer.prompt_from(RawRow(ordinal=0, origin=origin, data=sys.argv[3].encode()))
print(json.dumps([prompt.key, renderer.tokenizer_digest, renderer.template_digest]))
"""


@pytest.mark.slow
def test_the_environment_of_a_process_changes_no_prompt(tmp_path: Path) -> None:
    """The environment: time zone, locale and hash seed."""
    template = (
        "{{ strftime_now('%A %B %x %X %c %s') }}{{ tools | tojson }}{{ messages[0].keys() | list }}"
    )
    tokenizer_for(template + QWEN3).save_pretrained(tmp_path)
    row = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "w", "parameters": {"b": 1, "a": {"z": 2}}}],
    }
    found = []
    for changes in (
        {"TZ": "UTC", "PYTHONHASHSEED": "1", "LC_ALL": "C"},
        {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), NEW_YEAR, json.dumps(row)],
            env={**os.environ, **changes},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout)
    assert found[0] == found[1]
    assert len(json.loads(found[0])[0]) == 32


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text()) if path.exists() else {}
        change(document)
        path.write_text(json.dumps(document))

    return act


def rotate_letters(vocabulary: dict[str, int]) -> None:
    """Give each lower-case letter the id of the next one."""
    ids = [vocabulary[letter] for letter in ascii_lowercase]
    vocabulary.update(zip(ascii_lowercase, ids[1:] + ids[:1], strict=True))


CHANGES: dict[str, Callable[[Path], object]] = {
    "merges": edit("tokenizer.json", lambda t: t["model"]["merges"].reverse()),
    "vocabulary": edit("tokenizer.json", lambda t: rotate_letters(t["model"]["vocab"])),
    "pre-tokenizer": edit("tokenizer.json", lambda t: t["pre_tokenizer"].update(
        add_prefix_space=True)),
    "normalizer": edit("tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"})),
    "class": edit("tokenizer_config.json", lambda c: c.update(tokenizer_class="Qwen2Tokenizer")),
    "split": edit("tokenizer_config.json", lambda c: c.update(split_special_tokens=True)),
    "special": edit("tokenizer_config.json", lambda c: c.update(extra_special_tokens=["Hi"])),
    "special map": edit("special_tokens_map.json", lambda m: m.update(
        additional_special_tokens=["Hi"])),
    "added": edit("added_tokens.json", lambda a: a.update(Hi=700)),
    "template": lambda folder: (folder / "chat_template.jinja").write_text(QWEN3 + "!"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_file_of_the_tokenizer_that_changes_a_prompt_changes_a_digest(
    tmp_path: Path, change: str
) -> None:
    row = replace(ROW, data=b'{"prompt": "Hi <|im_end|>  there", "completion": "fine  thanks"}')
    tokenizer_for(QWEN3).save_pretrained(tmp_path)
    found = []
    for act in (lambda folder: None, CHANGES[change]):
        act(tmp_path)
        renderer = Renderer.load(str(tmp_path))
        prompt = renderer.prompt_from(row)
        assert isinstance(prompt, Prompt)
        found.append((prompt.key, (renderer.tokenizer_digest, renderer.template_digest)))
    (key, digests), (other_key, other_digests) = found
    assert key != other_key
    assert digests != other_digests

"""Text of others: shown without controls, stored without secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import unicodedata
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from extractor.cli import console as sinks
from extractor.cli.log import StderrHandler
from extractor.core.errors import UsageError
from extractor.core.foreign_text import REMOVED, told
from extractor.core.log_line import log_line
from extractor.core.printable import printable, printable_json
from extractor.servers.api_key import API_KEY_VARIABLE, MAX_KEY_BYTES, find_api_key
from extractor.status.page import page
from extractor.status.reporters import BarReporter, JsonReporter, LineReporter
from extractor.status.watcher import Look

#: Colours, the title of the window, the clipboard, C1, right to left, another line, not UTF-8.
HOSTILE = "\x1b[31m \x1b]0;title\x07 \x1b]52;c;eA==\x1b\\ \x9b2J \x7f \u202e \u2066 \u2028 \udcff"
CONTROLS = ("Cc", "Cs", "Zl", "Zp")


def assert_harmless(shown: str) -> None:
    """Nothing is left that a terminal would obey; what it was can be read."""
    left = {
        character
        for character in shown
        if unicodedata.category(character) in CONTROLS
        or unicodedata.bidirectional(character)
        in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
    }
    assert left <= {"\n", "\t"}
    assert r"\x9b2J" in shown or r"\u009b2J" in shown


def test_only_controls_are_escaped() -> None:
    text = "A line\n\tof 漢字, emoji 👩‍🔬, e\u0301, العربية \\x1b"
    assert printable(text) == text
    assert_harmless(printable(HOSTILE))
    assert printable("\r\u200e\u200f\u061c") == r"\x0d\u200e\u200f\u061c"


@given(st.text(st.characters()) | st.text(st.sampled_from([*HOSTILE])))
def test_whatever_is_escaped_reads_the_same_from_json(text: str) -> None:
    assert json.loads(printable_json({"text": text}, is_indented=True)) == {"text": text}
    shown = printable_json({"text": text})
    assert json.loads(shown) == {"text": text}
    assert printable(shown) == shown
    assert shown.encode()


def test_every_sink_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks.print_text(HOSTILE)
    assert_harmless(capsys.readouterr().out)
    sinks.print_json({"text": HOSTILE})
    assert_harmless(capsys.readouterr().out)
    sinks.report(HOSTILE)
    assert_harmless(capsys.readouterr().err)
    sinks.report_usage_error(click.UsageError(f"no such option: {HOSTILE}"))
    assert_harmless(capsys.readouterr().err)
    sinks.report_defect(KeyError, KeyError(HOSTILE), None)
    assert r"\x1b" in capsys.readouterr().err
    for as_objects in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        handler = StderrHandler(lambda objects=as_objects: objects)  # type: ignore[misc]
        handler.emit(logging.makeLogRecord({"msg": HOSTILE, "levelname": "INFO"}))
        assert_harmless(stream.getvalue())


@pytest.mark.parametrize("kind", [BarReporter, JsonReporter, LineReporter])
def test_every_reporter_escapes(
    kind: type[BarReporter | JsonReporter | LineReporter],
) -> None:
    stream = io.StringIO()
    kind(stream).report(HOSTILE)
    assert_harmless(stream.getvalue())


def test_a_line_of_the_log_stays_one_line_of_json() -> None:
    line = log_line(HOSTILE, detail="\u2028\n", path=Path(os.fsdecode(b"\xff")))
    assert_harmless(line)
    assert line.splitlines() == [line]
    assert json.loads(line)["detail"] == "\u2028\n"


def test_the_live_page_escapes_and_knows_no_markup() -> None:
    stream = io.StringIO()
    look = Look(out=Path(f"[link=evil]{HOSTILE}"), begun=None, live=None, writer=None)
    Console(file=stream, markup=False, highlight=False, width=200).print(page(look))
    assert_harmless(stream.getvalue())
    assert "[link=evil]" in stream.getvalue()


KEY = 'sk-"quoted"\\key/7'


@pytest.mark.parametrize(
    "words",
    [
        f"wrong key {KEY}",
        json.dumps({"headers": {"x": KEY}}),
        repr({"x": KEY}),
        "/login?key=sk-%22quoted%22%5Ckey/7 or sk-%22quoted%22%5Ckey%2F7",
    ],
)
def test_the_key_is_removed_in_every_usual_spelling(words: str) -> None:
    shown = told(words, secrets=[KEY])
    assert REMOVED in shown
    assert "quoted" not in shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("see https://me:hunter2@host/x", "see https://[removed]@host/x"),
        ("Authorization: Bearer abcdefgh123", "Authorization: Bearer [removed]"),
        ("authorization=basic bWU6aHVudGVyMg==", "authorization=basic [removed]"),
        ("no user@host, http://host/@x", "no user@host, http://host/@x"),
        ("a\n b\tc", "a b c"),
        ("a" * 300, "a" * 197 + "..."),
    ],
)
def test_other_secrets_and_length(words: str, shown: str) -> None:
    assert told(words) == shown


def test_a_key_is_removed_before_the_words_are_cut() -> None:
    shown = told("x" * 195 + "sk-secret-secret", secrets=["sk-secret-secret"])
    assert "sk-" not in shown


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("sk-1\nanother line\n")
    path.chmod(0o600)
    return path


def test_a_key_comes_from_the_file_or_else_from_the_variable(key_file: Path) -> None:
    environ = {API_KEY_VARIABLE: "sk-2"}
    found = find_api_key(key_file, environ=environ)
    assert found is not None
    assert (found.value, found.origin) == ("sk-1", f"--api-key-file {key_file}")
    assert "sk-1" not in repr(found)
    found = find_api_key(None, environ=environ)
    assert found is not None
    assert (found.value, found.origin) == ("sk-2", API_KEY_VARIABLE)
    assert find_api_key(None, environ={}) is find_api_key(None, environ={API_KEY_VARIABLE: ""})


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_key_file_may_be_read_by_its_group(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert find_api_key(key_file)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_key_file_of_others_is_refused_with_the_remedy(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:o}: others .*chmod 600"):
        find_api_key(key_file)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"\nsk-1\n", "is empty"),
        (b"sk-\x1b", "holds a character that is not printable ASCII"),
        ("sk-é".encode(), "holds a character that is not printable ASCII"),
        (b"k" * (MAX_KEY_BYTES + 1), "longer than any key"),
    ],
)
def test_a_file_without_a_key_is_refused(key_file: Path, data: bytes, problem: str) -> None:
    key_file.write_bytes(data)
    with pytest.raises(UsageError, match=problem):
        find_api_key(key_file)


def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="is not a regular file"):
            find_api_key(path)
    with pytest.raises(UsageError, match="missing"):
        find_api_key(tmp_path / "missing")


def test_a_key_file_of_another_user_is_refused(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.stat(key_file).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        os.chown(key_file, 4242, 0)
        owner = 4242
    with pytest.raises(UsageError, match=f"belongs to user {owner}"):
        find_api_key(key_file)

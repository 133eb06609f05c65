"""Commands as a user starts them, with text that would control the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from acceptance.tool import Fake, Result, Tool

pytestmark = pytest.mark.slow  # starts many processes

#: A title, the clipboard, a screen that is cleared, text from right to left.
HOSTILE = "\x1b]0;title\x07\x1b]52;c;eA==\x1b\\\x1b[2J\x9b2J\u202e"
NAME = f"{HOSTILE}.jsonl"


def assert_harmless(result: Result, *, is_shown: bool = True) -> None:
    output = result.stdout + result.stderr
    assert not {character for character in output if character in HOSTILE[:1] + "\x07\x9b\u202e"}
    assert "Traceback" not in output
    if is_shown:
        assert r"\x1b[2J" in output or r"\u001b[2J" in output


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    rows = [{"id": HOSTILE, "input_ids": [1, 2, 3]}, {"input_ids": HOSTILE}, {HOSTILE: "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("arguments", [("--log-json",), ("-vv", "--json")])
def test_a_run_shows_no_controls(
    tmp_path: Path, tool: Tool, fake: Fake, prompts: Path, arguments: tuple[str, ...]
) -> None:
    out = tmp_path / f"out{HOSTILE}"
    assert_harmless(tool.run(prompts, out, fake, *arguments))
    for command in ("status", "verify"):
        for more in ((), ("--json",)):
            is_shown = command == "status"
            assert_harmless(tool(command, out, *more), is_shown=is_shown)
    assert_harmless(tool("status", out, "--watch"), is_shown=False)
    document = tool("status", out, "--json").json()
    assert {row["source"] for row in document["failed_rows"]} == {str(prompts)}


def test_other_commands_show_no_controls(tmp_path: Path, tool: Tool, prompts: Path) -> None:
    show = ("show", prompts, "--tokenizer", "none", "--row")
    for row in range(3):
        assert_harmless(tool(*show, row))
        assert_harmless(tool(*show, row, "--json"))
    dry_run = tool("run", prompts, "--dry-run", "--tokenizer", "none", "--out", HOSTILE)
    assert_harmless(dry_run, is_shown=False)
    for arguments in (
        ["run", f"missing{HOSTILE}"],
        ["run", prompts, "--server", HOSTILE],
        ["run", prompts, "--shm-budget", HOSTILE],
        ["status", f"missing{HOSTILE}"],
        ["serve", "--model", f"/missing{HOSTILE}"],
        ["doctor", "--server", HOSTILE],
    ):
        result = tool(*arguments)
        assert result.returncode in (1, 2)
        assert_harmless(result)
    assert_harmless(tool(HOSTILE), is_shown=False)  # click leaves colours out itself


def test_a_name_that_is_not_unicode_can_be_printed(tmp_path: Path, tool: Tool) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    result = tool("run", path, "--tokenizer", "none")
    assert result.returncode == 2
    assert r"\udcff.jsonl: no such file" in result.stderr

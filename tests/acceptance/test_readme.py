"""What README tells people to type works as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from helpers import make_prompts, write_prompts

from acceptance.tool import REPOSITORY, Fake, Tool, fake_server
from extractor.cli.main import cli

README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every `extractor …` of README's shell blocks and code spans, as words."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"`(extractor [^`]*)`", README)
    words = [shlex.split(line, comments=True) for line in lines]
    return [found for found in words if found[:1] == ["extractor"]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_and_option_exists(words: list[str]) -> None:
    command = cli.commands[words[1]]
    ours = words[: words.index("--")] if "--" in words else words
    known = {name for param in command.params for name in param.opts}
    used = set(re.findall(r"--[a-z][a-z-]*", " ".join(ours)))
    assert used <= known


def test_every_command_is_in_the_table() -> None:
    table = {words[1] for words in commands()}
    assert table == set(cli.commands)
    assert all(isinstance(command, click.Command) for command in cli.commands.values())


@pytest.mark.slow
def test_the_two_commands_on_the_same_host_and_the_reading_of_a_shard(
    tool: Tool, fake: Fake
) -> None:
    """`extractor run prompts.jsonl`, `extractor verify`, then the Python blocks, word for word."""
    (block,) = [block for block in blocks("sh") if "extractor verify " in block]
    write_prompts(tool.cwd / "prompts.jsonl", make_prompts(3))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EXTRACTOR_RUN_SERVER": fake.url,
        "EXTRACTOR_RUN_DUMP_DIR": str(fake.root),
        "EXTRACTOR_RUN_TOKENIZER": "none",
    }
    programs = [[sys.executable, "-c", program] for program in blocks("python")]
    assert len(programs) == 2
    for script in (["bash", "-ec", block], *programs):
        done = subprocess.run(
            script, cwd=tool.cwd, env=environment, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stderr


def test_the_fake_server_starts_as_written(dump_root: Path) -> None:
    (line,) = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("python -m extractor.testing")
    ]
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "extractor.testing"]
    arguments = words[3:]
    arguments[arguments.index("--dump-root") + 1] = str(dump_root)
    arguments[arguments.index("--port") + 1] = "0"  # the written one may be taken
    with fake_server(dump_root, *arguments[2:]) as server:
        assert server.url.startswith("http://127.0.0.1:")

"""Every benchmark can be started: nothing that it imports has gone, and it says what it is for."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from benchmarks import prefill_overhead, slow_disk
from benchmarks.command import Failed, command_parser, run_command
from extractor.system.signals import STOP_SIGNALS

(FOLDER,) = map(Path, benchmarks.__path__)
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
#: The rest have no command of their own.
COMMANDS = [name for name in MODULES if "__main__" in (FOLDER / f"{name}.py").read_text()]
#: Its command line is that of `extractor`.
OF_EXTRACTOR = "null_destination"


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != OF_EXTRACTOR])
def test_help_is_the_docstring_as_written_and_a_word_on_each_argument(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    parsers: list[argparse.ArgumentParser] = []

    def keeping_parser(*arguments: str) -> argparse.ArgumentParser:
        parsers.append(command_parser(*arguments))
        return parsers[-1]

    monkeypatch.setattr(module, "command_parser", keeping_parser)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m benchmarks.{name} ")
    assert module.__doc__ is not None
    assert module.__doc__.strip() in shown
    assert f"python -m benchmarks.{name}" in module.__doc__, "how it is called"
    assert not re.search(r"\S {5,}--", module.__doc__), "a line that was to go on in the next"
    assert "(default: True)" not in shown, "of a switch that switches off"
    assert parsers != []
    assert [name for parser in parsers for name in without_help(parser)] == []


def without_help(parser: argparse.ArgumentParser) -> list[str]:
    """The arguments of which --help tells nothing but the name."""
    found = [action.dest for action in parser._actions if not action.help]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [name for each in action.choices.values() for name in without_help(each)]
    return found


def test_the_client_without_a_disk_has_the_clients_command_line() -> None:
    command = [sys.executable, "-m", f"benchmarks.{OF_EXTRACTOR}", "run", "--help"]
    ran = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert "--dump-dir" in ran.stdout, ran.stderr


def test_a_run_that_is_too_short_to_be_seen_has_no_figures() -> None:
    assert "more --prompts" in slow_disk.Seen().over_time()
    assert "more --prompts" in slow_disk.Seen(in_flight=[3, 3]).over_time()
    seen = slow_disk.Seen(in_flight=[1, 3, 5, 4, 0], longest_pause_s=0.25)
    assert seen.over_time() == (
        "in flight 4 at the median, 5 at most; longest pause between samples 0.2 s"
    )


def test_the_client_is_measured_as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    async def run(options: argparse.Namespace) -> None:
        seen.append(options)

    monkeypatch.setattr(prefill_overhead, "run", run)
    for movers in ([], ["--movers", "1"]):
        monkeypatch.setattr(sys, "argv", ["prefill_overhead", "--model", "m", *movers])
        prefill_overhead.main()
    assert [options.client for options in seen] == [(), ("--movers", "1")]


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """As they were, after a test that runs a command in this process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (Failed("no server"), 1, "no server"),
        (ExceptionGroup("many", [Failed("no server")]), 1, "no server"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "x.json"),
        (ModuleNotFoundError(name="matplotlib"), 2, "pip install 'hidden-state-extractor[bench]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_is_no_defect_is_told_without_a_traceback(
    error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == status
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("signal_handlers")
def test_a_defect_keeps_its_traceback() -> None:
    def main() -> None:
        raise ModuleNotFoundError(name="extractor.moved")

    with pytest.raises(ModuleNotFoundError):
        run_command(main)

"""What the commands of all benchmarks share: --help, errors as one line, an orderly Ctrl-C."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from extractor.core.errors import ExtractorError, Interrupted, MissingExtra, exit_code, first_known
from extractor.system.signals import STOP_SIGNALS

#: Packages that a benchmark needs and the client does not, and the extra that brings each.
EXTRAS = {"matplotlib": "bench", "sglang": "server", "torch": "server"}


class Failed(ExtractorError):
    """Why there are no figures. Shown as one message, no traceback."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """The docstring as it is written, and each option's default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # A bool is a switch's, and of one that switches off it says the opposite of the help.
        has_default = action.default not in (None, [], argparse.SUPPRESS)
        if action.option_strings and has_default and not isinstance(action.default, bool):
            return f"{action.help} (default: %(default)s)"
        return action.help


def command_parser(doc: str | None, file: str) -> argparse.ArgumentParser:
    """doc, file: of the benchmark's module."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{Path(file).stem}",
        description=doc,
        formatter_class=_Help,
        allow_abbrev=False,
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which running server: `--server`, and its `--dump-dir`."""
    parser.add_argument("--server", required=True, help="URL of a server with the plugin")
    parser.add_argument("--dump-dir", type=Path, required=True, help="where it dumps")


def number_from(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number, `least` at the least."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def directory(text: str) -> Path:
    """A type of argument: a directory that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return Path(text)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with what it returns. A stop signal ends it in order, as Ctrl-C does,
    for what a benchmark has in /dev/shm may be large; what is no defect is told in a line."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    except Exception as error:
        shown = first_known(error)
        if isinstance(shown, ModuleNotFoundError) and shown.name in EXTRAS:
            shown = MissingExtra(command="it", extra=EXTRAS[shown.name], package=shown.name)
        status = exit_code(shown)
        if status is None:
            raise  # a defect: the traceback is the report
        print(f"{Path(sys.argv[0]).stem}: {shown}", file=sys.stderr)
        sys.exit(status)


@contextmanager
def child(
    command: Sequence[str], *, stderr: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` beside the block, its output piped; leaving the block ends it in order."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def run_arguments(prompts: Path, *, out: Path, server: str, dump_root: Path) -> list[str]:
    """Of an `extractor run` over rows of ids, for `session_of`. server: its URL."""
    return [
        "run", str(prompts), "--out", str(out), "--server", server,
        "--tokenizer", "none", "--dump-dir", str(dump_root), "--json",
    ]  # fmt: skip


def session_of(output: bytes, status: int) -> dict[str, Any]:
    """What `extractor run --json` printed of its session. Raises Failed unless all is stored."""
    if status:
        raise Failed(f"`extractor run` ended with exit status {status}: see what it says above")
    session: dict[str, Any] = json.loads(output)["session"]
    return session

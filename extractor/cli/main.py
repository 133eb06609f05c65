"""The command line: the group of its commands, and the exit status.

stdout is data, stderr is status. Exit: 0 done and clean, 1 findings or failed rows, 2 usage or
configuration, 3 server trouble (rows stay resumable), 4 a disk or /dev/shm is full or fails, 130
interrupted. `extractor.core.errors` has the tree.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from extractor.cli.console import report, tell_error
from extractor.cli.doctor_command import doctor_command
from extractor.cli.options import Commands
from extractor.cli.run_command import run_command
from extractor.cli.serve_command import serve_command
from extractor.cli.show_command import show_command
from extractor.cli.status_command import status_command
from extractor.cli.verify_command import verify_command
from extractor.core.errors import Interrupted, exit_code, first_known, message_of
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.core.version import __version__


@click.group(
    cls=Commands,
    context_settings={
        "auto_envvar_prefix": "EXTRACTOR",
        "show_default": True,
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__, prog_name="extractor")
@click.option("-v", "--verbose", is_flag=True, help="Show a traceback with every error.")
def cli(verbose: bool) -> None:
    """Hidden states of a large model, for every token of many prompts, out of a SGLang server.

    Every option can be set by a variable: EXTRACTOR_RUN_OUT for `extractor run --out`.

    Exit status: 0 done and clean, 1 findings or failed rows, 2 usage, configuration or limits (a
    person must change something), 3 server trouble, 4 a disk or /dev/shm is full or fails, 130
    interrupted. After 3, 4 and 130 the same command resumes.
    """


for command in (
    run_command,
    show_command,
    serve_command,
    verify_command,
    status_command,
    doctor_command,
):
    cli.add_command(command)


def main(timings: Timings = DEFAULT_TIMINGS) -> NoReturn:
    """Entry point of `extractor`: errors as messages on stderr, and the exit status."""
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:2]))
    try:
        # Not standalone, click returns what `context.exit` was given instead of exiting.
        status = cli.main(standalone_mode=False, obj=timings)
    except click.ClickException as error:
        tell_error(error.format_message(), exit_status=error.exit_code, otherwise=error.show)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = Interrupted.exit_code
        tell_error("interrupted", exit_status=code, otherwise=lambda: report("interrupted"))
        sys.exit(code)
    except BrokenPipeError:
        # The reader of our output went away, as `head` does: not our error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except BaseException as error:
        shown = first_known(error)
        known = exit_code(shown)
        if known is None:
            raise  # a defect: the traceback is the report
        lines = traceback.format_exception(error) if verbose else []

        def as_text() -> None:
            report(f"{''.join(lines)}extractor: {message_of(shown)}")

        fields = {"traceback": lines} if verbose else {}
        tell_error(message_of(shown), exit_status=known, otherwise=as_text, **fields)
        sys.exit(known)
    sys.exit(status or 0)

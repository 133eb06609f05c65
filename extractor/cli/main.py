"""The command line: the group of its commands. `extractor.core.errors` has the exit statuses."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from functools import partial
from typing import NoReturn

import click

from extractor.cli.console import (
    console,
    report,
    report_defect,
    report_error,
    report_usage_error,
)
from extractor.cli.doctor_command import doctor_command
from extractor.cli.options import Commands, verbose_option
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
def cli() -> None:
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


cli.params.append(verbose_option())


def main(timings: Timings = DEFAULT_TIMINGS) -> NoReturn:
    """Entry point of `extractor`: errors as messages on stderr, and the exit status."""
    console.reset()
    sys.excepthook = report_defect
    threading.excepthook = lambda found: report_defect(*found[:3])
    try:
        # Not standalone, click returns what `context.exit` was given instead of exiting.
        status = cli.main(standalone_mode=False, obj=timings)
    except click.ClickException as error:
        report_error(
            error.format_message(),
            exit_status=error.exit_code,
            show=partial(report_usage_error, error),
        )
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = Interrupted.exit_code
        report_error("interrupted", exit_status=code, show=lambda: report("interrupted"))
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
        message = message_of(shown)
        lines = traceback.format_exception(error) if console.verbosity else []
        report_error(
            message,
            exit_status=known,
            show=lambda: report(f"{''.join(lines)}extractor: {message}"),
            **({"traceback": lines} if lines else {}),
        )
        sys.exit(known)
    sys.exit(status or 0)

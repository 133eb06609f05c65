"""The error tree and what each branch means to a caller.

```
ExtractorError
├── UsageError          exit 2   the command, a file, a limit or a permission; the user must fix it
│   ├── ConfigMismatch           the output directory holds another run's data
│   ├── OutputBusy               another process writes the output directory
│   ├── BadAddress               the server's address cannot work: its host, HTTP or TLS
│   ├── BadDumpDir               --dump-dir is not the server's, or others can change it
│   └── MissingExtra             a package of an optional extra is not installed
├── ServerError         exit 3   the server or its plugin; rows stay resumable
│   ├── ServerUnreachable
│   ├── PluginError              absent, failed, or captures something else
│   └── ServerLost               serves nothing any more, in mid-run
│       └── ServerGone           its process died, or nothing answers: it may come back
├── SpaceError          exit 4   a disk or /dev/shm is full or failing; nothing is lost
├── CorruptData         exit 1   bytes on disk are not what the manifest says
├── RowRefused          exit 1   a row of the input for which the user asked the run to stop
└── Interrupted         exit 130 a signal; rows stay resumable
```

The leaf packages keep a class of their own each (`LEAF_ERRORS`), mapped to exit codes here.

`manifest.causes`, the table of errnos, turns a failed system call into a SpaceError or a
UsageError. An errno that is not in the table is a UsageError that shows its name, if it concerns
the files of a data set: status 1 would mean "finished, with failed rows", and 3 or 4 would make a
scheduler retry a failure that needs a look first. Anywhere else it is a bug, with a traceback.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from manifest.causes import AMBIGUOUS_ERRNOS, CAUSES, cause_of, named
from manifest.exceptions import ManifestError, ManifestSpaceError
from prompts.types import InputError, TokenizerError
from server_patch.dump_format import DumpFormatError


class ExtractorError(Exception):
    """Base of everything this package raises on purpose. Shown as one message, no traceback.

    The message says what failed, on what, and what to do next.
    """

    exit_code = 1


class UsageError(ExtractorError):
    """The command, a file or the configuration is wrong."""

    exit_code = 2


class ConfigMismatch(UsageError):
    """The output directory was begun with another configuration."""


class OutputBusy(UsageError):
    """Another live process holds the output directory."""


class BadAddress(UsageError):
    """The server's address cannot work, and waiting does not help: its host, HTTP or TLS."""


class BadDumpDir(UsageError):
    """The given --dump-dir cannot be used: no server dumps there, or another one does, or other
    users can change it."""


class MissingExtra(UsageError):
    """A command needs a package that an optional extra installs."""

    def __init__(self, *, command: str, extra: str, package: str) -> None:
        super().__init__(
            f"{command} needs the package {package}, which is not installed. Run:\n"
            f"  pip install 'hidden-state-extractor[{extra}]'"
        )


class ServerError(ExtractorError):
    """The server or its plugin is in trouble; rows stay resumable.

    `what`: what happened, for a caller that goes on by itself. `advice`: what a person is to do.
    """

    exit_code = 3

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}. {advice}" if advice else what)
        self.what = what
        self.advice = advice


class ServerUnreachable(ServerError):
    """Nothing answers at the server's address."""


class PluginError(ServerError):
    """The server answers, but its plugin is absent, failed, or captures something else."""


class ServerLost(ServerError):
    """The server stopped answering in mid-run."""


class ServerGone(ServerLost):
    """The server died or does not answer; another may take its place."""


class SpaceError(ExtractorError):
    """No space is left where it is needed; nothing is lost."""

    exit_code = 4


class CorruptData(ExtractorError):
    """Bytes on disk are not what the manifest says."""


class RowRefused(ExtractorError):
    """A row cannot be used, and the user asked the run to stop at such a one."""


class Interrupted(ExtractorError):
    """A signal asked the run to stop; the same command goes on."""

    exit_code = 130


#: The leaf packages' own errors and what they mean for the exit code.
LEAF_ERRORS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (ManifestSpaceError, 4),
    (ManifestError, 2),
    (InputError, 2),
    (TokenizerError, 2),
    (DumpFormatError, 1),
)


def storage_error(error: OSError, *, where: Path | None = None) -> ExtractorError:
    """The error to raise for a failed file operation.

    `where`: the path in question, for errors that do not name a file.
    """
    if isinstance(error.filename, str | bytes | Path) and error.filename:
        where = Path(os.fsdecode(error.filename))
    place = "" if where is None else f"{where}: "
    cause = cause_of(error.errno)
    kind = SpaceError if cause.is_storage else UsageError
    return kind(
        f"{place}{cause.what} ({named(error.errno, error.strerror or str(error))}). Nothing that "
        f"is stored is lost: {cause.advice}, and run the same command again."
    )


def message_of(error: BaseException) -> str:
    """The text to show for an error that has an exit code."""
    if isinstance(error, OSError) and not isinstance(error, ExtractorError):
        return str(storage_error(error))
    return str(error)


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error that people should see as a message; None for a defect."""
    if isinstance(error, ExtractorError):
        return error.exit_code
    for leaf, code in LEAF_ERRORS:
        if isinstance(error, leaf):
            return code
    if isinstance(error, OSError) and error.errno in CAUSES:
        if error.filename is not None or error.errno not in AMBIGUOUS_ERRNOS:
            return storage_error(error).exit_code
    return None


def first_known(error: BaseException) -> BaseException:
    """The error to show of an exception group: the first that has an exit code, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_known(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if exit_code(leaf) is not None), leaves[0])

"""The error tree and what each branch means to a caller.

```
ExtractorError
├── UsageError          exit 2   the command, a file or the configuration; a person must change it
│   ├── ConfigMismatch           the output directory holds another run's data
│   ├── OutputBusy               another process writes the output directory
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
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from manifest.errors import ManifestError, ManifestSpaceError
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


class MissingExtra(UsageError):
    """A command needs a package that an optional extra installs."""

    def __init__(self, *, command: str, extra: str, package: str) -> None:
        super().__init__(
            f"{command} needs the package {package}, which is not installed. Run:\n"
            f"  pip install 'hidden-state-extractor[{extra}]'"
        )


class ServerError(ExtractorError):
    """The server or its plugin is in trouble; rows stay resumable."""

    exit_code = 3


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

_SPACE_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN_ERRNOS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
#: The path's own fault, where it is somebody's to name; else it is the disk's.
NO_SUCH_PATH_ERRNOS: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_GO_ON: Final = "Nothing that is stored is lost"


def is_out_of_space(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _SPACE_ERRNOS


def storage_error(error: OSError, *, where: Path) -> ExtractorError:
    """What a failed operation on the files of a data set means to its owner."""
    if is_out_of_space(error):
        return SpaceError(
            f"{where}: no space left. {_GO_ON}: free space and run the same command again."
        )
    if error.errno in _FORBIDDEN_ERRNOS:
        return UsageError(
            f"{where}: cannot be written ({error.strerror}). {_GO_ON}: make it writable and run "
            "the same command again, or name another --out."
        )
    return SpaceError(
        f"{where}: the disk fails ({error}). {_GO_ON}: see to the disk and run the same command "
        "again."
    )


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error that people should see as a message; None for a defect."""
    if isinstance(error, ExtractorError):
        return error.exit_code
    for leaf, code in LEAF_ERRORS:
        if isinstance(error, leaf):
            return code
    if is_out_of_space(error):
        return SpaceError.exit_code
    if isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError):
        return UsageError.exit_code
    if isinstance(error, OSError) and error.errno in NO_SUCH_PATH_ERRNOS:
        return UsageError.exit_code
    return None


def first_known(error: BaseException) -> BaseException:
    """The error to show of an exception group: the first that has an exit code, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_known(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if exit_code(leaf) is not None), leaves[0])

"""Edge: opens the dump root and the directories in it, if nobody else can change them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from extractor.core.errors import BadDumpDir, storage_error
from extractor.core.locations import DEFAULT_DUMP_ROOT, DumpRoot
from manifest.causes import LIMIT_ERRNOS
from server_patch.directory import Directory
from server_patch.settings import is_boot_id
from server_patch.trust import UntrustedDirectory, open_trusted

_NAME_THE_SERVERS = (
    "Name the directory that the server's plugin dumps under (its SGLANG_HS_DUMP_DIR)."
)
_RANK = re.compile(r"0|[1-9][0-9]{0,3}")


def open_root(root: DumpRoot, *, make_mode: int | None = None) -> Directory | None:
    """Open the dump root; None where there is none.

    make_mode: make it then, with these permission bits. Raises BadDumpDir for a root that others
    can change, or that cannot be read; SpaceError, UsageError.
    """
    owners = () if root.owner is None else (root.owner,)
    try:
        return open_trusted(root.path, owners=owners, is_shared=root.is_shared, make_mode=make_mode)
    except UntrustedDirectory as error:
        raise BadDumpDir(_refusal(root, error, is_made=make_mode is not None)) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and make_mode is None:
            return None
        if error.errno in LIMIT_ERRNOS:
            raise storage_error(error, where=root.path) from error
        problem, advice = (
            ("made", "Name another directory.")
            if make_mode is not None
            else ("read", _NAME_THE_SERVERS)
        )
        raise BadDumpDir(
            f"--dump-dir {root.path} cannot be {problem} ({error.strerror}). {advice}"
        ) from error


def _refusal(root: DumpRoot, error: UntrustedDirectory, *, is_made: bool) -> str:
    """`is_made`: for a server of this user, which is started there."""
    place = Path(error.filename)
    others = "Name another directory with --dump-dir"
    sharing = ""
    if error.errno == errno.ELOOP:
        others = "Name a directory, not a link, with --dump-dir"
    elif not error.bits:
        if place == root.path != DEFAULT_DUMP_ROOT:
            sharing = f" If you trust that user's server, add --dump-owner {error.owner}."
    else:
        if error.owner == os.geteuid():
            who = "".join(name for name, bit in (("g", 0o020), ("o", 0o002)) if error.bits & bit)
            others = f"Run `chmod {who}-w {place}`, or name another directory with --dump-dir"
        if place == root.path and error.bits == 0o020:
            sharing = (
                " To share it with its group, start the server with --file-mode 660."
                if is_made
                else " If a group shares it, add --dump-owner and the user whose server dumps "
                "there (you, if it is your server)."
            )
    return (
        f"the dump directory {root.path} is not used, as others could change what is in it: "
        f"{place} {error.strerror}. {others}.{sharing}"
    )


def rank_directories(root: Directory) -> Iterator[tuple[str, int, Directory | OSError]]:
    """Every `<root>/<boot id>/<rank>/`: boot id, rank, and the directory or why it is not opened.

    Others are no concern of ours. Raises OSError if the root itself cannot be listed.
    """
    for boot_id in root.subdirectory_names():
        if not is_boot_id(boot_id):
            continue
        try:
            with root.subdirectory(boot_id) as boot:
                ranks = [name for name in boot.subdirectory_names() if _RANK.fullmatch(name)]
                for rank in sorted(map(int, ranks)):
                    try:
                        yield boot_id, rank, boot.subdirectory(str(rank))
                    except FileNotFoundError:
                        continue  # removed meanwhile
                    except OSError as error:
                        yield boot_id, rank, error
        except FileNotFoundError:
            continue
        except OSError as error:
            yield boot_id, 0, error


def remove_rank(root: Directory, boot_id: str, rank: int) -> None:
    """Remove the directory of a rank, and that of its server when it is then empty. What cannot be
    removed is left."""
    with suppress(OSError), root.subdirectory(boot_id) as boot:
        with suppress(OSError):
            boot.remove_tree(str(rank))
        with suppress(OSError):  # another rank's directory is still beside it
            root.remove_subdirectory(boot_id)

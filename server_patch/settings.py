"""The configuration of the plugin: the `SGLANG_HS_*` environment variables, parsed once.

Standard library only. `Settings.from_environ` returns None when `SGLANG_HS_DUMP_DIR` is absent:
the plugin is then inert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server_patch.dump_format import LAST_TENSORS

DUMP_DIR: Final = "SGLANG_HS_DUMP_DIR"
BOUNDARIES: Final = "SGLANG_HS_BOUNDARIES"
LAST: Final = "SGLANG_HS_LAST"
RID_PREFIX: Final = "SGLANG_HS_RID_PREFIX"
RING_BYTES: Final = "SGLANG_HS_RING_BYTES"
RING_SLOTS: Final = "SGLANG_HS_RING_SLOTS"
WRITERS: Final = "SGLANG_HS_WRITERS"
FILE_MODE: Final = "SGLANG_HS_FILE_MODE"
BOOT_ID: Final = "SGLANG_HS_BOOT_ID"
LOG_LEVEL: Final = "SGLANG_HS_LOG_LEVEL"

EAGLE3: Final = "eagle3"
DEFAULT_RID_PREFIX: Final = "xtr-"
DEFAULT_RING_SLOTS: Final = 4
DEFAULT_FILE_MODE: Final = 0o600
LOG_LEVELS: Final = ("DEBUG", "WARNING")

_BOOT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_RING_BYTES = 1 << 16


class SettingsError(ValueError):
    """The value of a `SGLANG_HS_*` variable is invalid; the message names the variable."""


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """Limits of the staging memory and of the writer processes."""

    ring_bytes: int | None = None  # staging memory in all; None: from the prefill chunk size
    ring_slots: int = DEFAULT_RING_SLOTS  # forwards that can be in flight at once
    num_writers: int | None = None  # processes that write files; None: by device

    def __post_init__(self) -> None:
        if self.ring_bytes is not None and self.ring_bytes < _MIN_RING_BYTES:
            raise SettingsError(f"{RING_BYTES} must be >= {_MIN_RING_BYTES}, is {self.ring_bytes}")
        if not 2 <= self.ring_slots <= 64:
            raise SettingsError(f"{RING_SLOTS} must be in 2..64, is {self.ring_slots}")
        if self.num_writers is not None and not 1 <= self.num_writers <= 64:
            raise SettingsError(f"{WRITERS} must be in 1..64, is {self.num_writers}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of the plugin, independent of the model."""

    dump_dir: Path  # absolute; one directory per server start is made below it
    boundaries: tuple[int, ...] | None = None  # ascending; None: the EAGLE-3 default
    last_kind: str = "post"  # post, pre or both
    rid_prefix: str = DEFAULT_RID_PREFIX  # requests without it are counted, never written
    writers: WriterSettings = WriterSettings()
    file_mode: int = DEFAULT_FILE_MODE  # permission bits of every file
    boot_id: str | None = None  # names this server start; None: made by the main process
    log_level: str | None = None  # of lines about single requests; None: there are none

    def __post_init__(self) -> None:
        if not self.dump_dir.is_absolute():
            raise SettingsError(f"{DUMP_DIR} must be an absolute path, is {str(self.dump_dir)!r}")
        if self.boundaries is not None:
            _check_boundaries(self.boundaries)
        if self.last_kind not in LAST_TENSORS:
            raise SettingsError(f"{LAST} must be post, pre or both, is {self.last_kind!r}")
        require_file_mode(self.file_mode, name=FILE_MODE)
        if self.boot_id is not None and not is_boot_id(self.boot_id):
            raise SettingsError(
                f"{BOOT_ID} must be 1 to 64 letters, digits, '.', '_' or '-', starting with a "
                f"letter or digit, is {self.boot_id!r}"
            )
        if self.log_level is not None and self.log_level not in LOG_LEVELS:
            raise SettingsError(
                f"{LOG_LEVEL} must be one of {', '.join(LOG_LEVELS)}, is {self.log_level!r}"
            )

    @property
    def directory_mode(self) -> int:
        """Permission bits of directories."""
        return directory_mode(self.file_mode)

    @property
    def is_shared(self) -> bool:
        """Whether the group may write: then it may also change the dump root."""
        return bool(self.file_mode & 0o020)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings | None:
        """Parse `environ`; None without `SGLANG_HS_DUMP_DIR`. Raises SettingsError."""
        dump_dir = environ.get(DUMP_DIR, "").strip()
        if not dump_dir:
            return None
        return cls(
            dump_dir=Path(dump_dir),
            boundaries=_parse_boundaries(environ.get(BOUNDARIES, "").strip() or EAGLE3),
            last_kind=environ.get(LAST, "").strip() or "post",
            rid_prefix=environ.get(RID_PREFIX) or DEFAULT_RID_PREFIX,
            writers=WriterSettings(
                ring_bytes=_parse_int(environ, RING_BYTES),
                ring_slots=_parse_int(environ, RING_SLOTS) or DEFAULT_RING_SLOTS,
                num_writers=_parse_int(environ, WRITERS),
            ),
            file_mode=_parse_int(environ, FILE_MODE, base=8) or DEFAULT_FILE_MODE,
            boot_id=environ.get(BOOT_ID, "").strip() or None,
            log_level=environ.get(LOG_LEVEL, "").strip().upper() or None,
        )

    def resolve_boundaries(self, num_layers: int) -> tuple[int, ...]:
        """The boundaries to capture in a model of `num_layers` layers. Raises SettingsError."""
        if self.boundaries is None:
            wanted = (2, num_layers // 2, num_layers - 3)
            if not 0 <= wanted[0] < wanted[1] < wanted[2] < num_layers:
                raise SettingsError(
                    f"{BOUNDARIES}={EAGLE3} means {list(wanted)}, which are not three ascending "
                    f"boundaries of a model with {num_layers} layers: name them, as in "
                    f"{BOUNDARIES}=1,2,3"
                )
            return wanted
        highest = self.boundaries[-1]
        if highest == num_layers:
            raise SettingsError(
                f"{BOUNDARIES} asks for {highest}, the state after the last of {num_layers} "
                f"layers: leave it out and set {LAST}=pre or {LAST}=both"
            )
        if highest > num_layers:
            raise SettingsError(
                f"{BOUNDARIES} must be in 0..{num_layers - 1} for this model, has {highest}"
            )
        return self.boundaries


def require_file_mode(file_mode: int, *, name: str) -> None:
    """Raise SettingsError, naming the option `name`, for permission bits that files cannot have."""
    if file_mode & ~0o664 or file_mode & 0o600 != 0o600:
        # Whom others let write could put files of their own in the place of these.
        raise SettingsError(f"{name} must be octal: 600, 640, 644, 660 or 664, is {file_mode:o}")


def directory_mode(file_mode: int) -> int:
    """Permission bits of directories: readers of files may search, writers may remove files.

    >>> f"{directory_mode(0o640):o}"
    '750'
    """
    return file_mode | (file_mode & 0o444) >> 2


def is_boot_id(text: str) -> bool:
    """Whether `text` is a valid boot id."""
    return _BOOT_ID.fullmatch(text) is not None


def _parse_boundaries(text: str) -> tuple[int, ...] | None:
    if text.lower() == EAGLE3:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(
            f"{BOUNDARIES} must be {EAGLE3!r} or a list such as 3,31,59, is {text!r}"
        ) from None


def _check_boundaries(boundaries: tuple[int, ...]) -> None:
    if min(boundaries) < 0:
        raise SettingsError(f"{BOUNDARIES} must be >= 0, has {min(boundaries)}")
    if list(boundaries) != sorted(set(boundaries)):
        raise SettingsError(f"{BOUNDARIES} must ascend and not repeat, is {list(boundaries)}")


def _parse_int(environ: Mapping[str, str], name: str, *, base: int = 10) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text, base)
    except ValueError:
        kind = "an octal number" if base == 8 else "a whole number"
        raise SettingsError(f"{name} must be {kind}, is {text!r}") from None
    if value <= 0:
        raise SettingsError(f"{name} must be > 0, is {text!r}")
    return value

"""The entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in each of its processes: main, scheduler (one per tensor-parallel rank),
detokenizer. Without `SGLANG_HS_DUMP_DIR` nothing else ever happens, and torch is not imported.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from server_patch.dump_dir import RankDir, make_boot_id
from server_patch.ready import write_failed
from server_patch.settings import (
    BOOT_ID,
    DEFAULT_FILE_MODE,
    DUMP_DIR,
    Settings,
    SettingsError,
    is_boot_id,
)
from server_patch.trust import open_or_make, open_trusted

logger = logging.getLogger(__name__)

_PRIVATE: Final = 0o700


def register() -> None:
    """Register the hooks if the environment asks for it. Raises SettingsError; SGLang logs it."""
    try:
        settings = Settings.from_environ(os.environ)
    except SettingsError as error:
        _report_bad_settings(str(error))
        raise
    if settings is None:
        return
    from server_patch import arming, request_log, sglang_api

    request_log.set_level(settings.log_level)

    # The main process comes first; its children inherit the id and so meet in one directory.
    os.environ.setdefault(BOOT_ID, make_boot_id())
    sglang_api.register_after(sglang_api.LOAD_MODEL, arming.after_load_model)
    sglang_api.register_after(sglang_api.INIT_FORWARD_BATCH, sglang_api.note_prompt_lengths)
    sglang_api.register_weight_hooks(
        before_update=arming.before_weight_update,
        after_label=arming.after_weight_label,
        after_late_load=arming.after_late_load,
    )


def _report_bad_settings(reason: str) -> None:
    """Write the reason to FAILED.json as well, if the root and the boot id can be read.

    The first process does it; in the others the directory exists already.
    """
    root = Path(os.environ.get(DUMP_DIR, ""))
    boot_id = os.environ.setdefault(BOOT_ID, make_boot_id())
    if not root.is_absolute() or not is_boot_id(boot_id):
        return
    try:
        with (
            open_trusted(root, make_mode=_PRIVATE) as top,
            open_or_make(top, boot_id, mode=_PRIVATE) as boot,
            boot.make_subdirectory("0", mode=_PRIVATE) as directory,
        ):
            rank_dir = RankDir(
                directory=directory, boot_id=boot_id, rank=0, file_mode=DEFAULT_FILE_MODE
            )
            write_failed(rank_dir, reason)
    except OSError as error:
        logger.error("hidden states: the reason cannot be written: %s", error)

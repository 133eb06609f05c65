"""The entry point of the group `sglang.srt.plugins`, and what it starts in a scheduler process.

SGLang calls `register` in each of its processes: main, scheduler (one per tensor-parallel rank),
detokenizer. Without `SGLANG_HS_DUMP_DIR` that is all that ever happens.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_patch.settings import (
    BOOT_ID,
    DEFAULT_FILE_MODE,
    DUMP_DIR,
    Settings,
    SettingsError,
    is_boot_id,
)

if TYPE_CHECKING:
    from server_patch.arm import CapturePoints, Parts
    from server_patch.engine import Facts
    from server_patch.home import Home

logger = logging.getLogger(__name__)


def register() -> None:
    """Register our hooks if the environment asks for it. Raises SettingsError; SGLang logs it."""
    try:
        settings = Settings.from_environ(os.environ)
    except SettingsError as error:
        _tell_bad_settings(str(error))
        raise
    if settings is None:
        return
    from server_patch import engine
    from server_patch.home import make_boot_id

    # The main process comes first; its children inherit the id and so meet in one directory.
    os.environ.setdefault(BOOT_ID, make_boot_id())
    engine.register_after(engine.LOAD_MODEL, _after_load_model)
    engine.register_after(engine.INIT_FORWARD_BATCH, engine.note_prompt_lengths)


def _after_load_model(_result: Any, runner: Any, *_: Any, **__: Any) -> None:
    """Arm the model that `runner` has just loaded. Whatever fails, the server goes on serving."""
    from server_patch import engine

    try:
        if engine.is_draft(runner):
            return
        settings = Settings.from_environ(os.environ)
        if settings is not None:
            _set_up(runner, settings)
    except Exception:
        logger.exception("hidden states: not armed")


def _set_up(runner: Any, settings: Settings) -> None:
    """Arm this rank's model, and start the writer where it belongs.

    Arming and installing go alike on every tensor-parallel rank, because the engine's capture may
    contain collectives. What only the writer's rank does can fail there alone, and must then leave
    the capture in place.
    """
    from server_patch import engine
    from server_patch.capture import Capture, install
    from server_patch.writing import start_writing

    facts = engine.read_facts(runner)
    home = _make_home(settings, facts) if facts.is_writer else None
    try:
        parts, points = _arm(runner, settings, facts)
        capture = Capture(
            points=points, rid_prefix=settings.rid_prefix, shares_forward=facts.shares_forward
        )
        install(parts.inner, capture)
    except Exception as error:
        _refuse(home, error)
        return
    if home is None:
        return
    try:
        writing = start_writing(
            settings=settings,
            facts=facts,
            home=home,
            boundaries=points.boundaries,
            final_norm=parts.final_norm() if settings.last_kind != "post" else None,
        )
        capture.connect(writing.tap, writing.norm_probe)
        writing.tell_ready(
            architecture=parts.architecture, config_digest=engine.config_digest(runner)
        )
    except Exception as error:
        capture.connect(None, None)
        _refuse(home, error)


def _arm(runner: Any, settings: Settings, facts: Facts) -> tuple[Parts, CapturePoints]:
    """Raises EngineError, SettingsError, ArmError: the same on every rank."""
    from server_patch import arm, engine

    reasons = engine.refusals(runner)
    if reasons:
        raise engine.EngineError("; ".join(reasons))
    boundaries = settings.resolve_boundaries(facts.num_layers)
    if boundaries[0] == 0 and not engine.captures_boundary_zero():
        raise engine.EngineError(
            f"SGLang {facts.engine_version} cannot capture boundary 0, the embeddings: leave it out"
        )
    parts = arm.find_parts(runner.model, num_layers=facts.num_layers)
    return parts, arm.arm(parts, boundaries)


def _make_home(settings: Settings, facts: Facts) -> Home | None:
    """This writer's directory, or None (logged) if it cannot be made."""
    from server_patch.home import HomeError, make_home

    try:
        return make_home(
            settings.dump_dir,
            boot_id=os.environ[BOOT_ID],
            rank=facts.rank,
            num_ranks=facts.dp_size,
            file_mode=settings.file_mode,
            directory_mode=settings.directory_mode,
        )
    except (OSError, HomeError) as error:
        logger.error("hidden states: nothing will be written: %s", error)
        return None


def _refuse(home: Home | None, error: Exception) -> None:
    """Say why nothing is captured, where the client looks for it."""
    from server_patch.home import tell_failed

    reason = str(error) or repr(error)
    logger.error("hidden states: not captured: %s", reason, exc_info=error)
    if home is not None:
        try:
            tell_failed(home, reason)
        except OSError as problem:
            logger.error("hidden states: the reason cannot be written: %s", problem)


def _tell_bad_settings(reason: str) -> None:
    """Leave the reason under the root as well, if that much of the environment can be read.

    The first process does it; in the others the directory exists already.
    """
    from server_patch.home import Home, make_boot_id, tell_failed

    root = os.environ.get(DUMP_DIR, "")
    boot_id = os.environ.setdefault(BOOT_ID, make_boot_id())
    directory = Path(root) / boot_id / "0"
    if not directory.is_absolute() or not is_boot_id(boot_id):
        return
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        home = Home(directory=directory, boot_id=boot_id, rank=0, file_mode=DEFAULT_FILE_MODE)
        tell_failed(home, reason)
    except OSError as error:
        logger.error("hidden states: the reason cannot be written: %s", error)

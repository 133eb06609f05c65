"""The entry point of the group `sglang.srt.plugins`, and the start of a scheduler's capture.

SGLang calls `register` in each of its processes: main, scheduler (one per tensor-parallel rank),
detokenizer. Without `SGLANG_HS_DUMP_DIR` nothing else ever happens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
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
    from server_patch.capture import Probe
    from server_patch.capture_points import CapturePoints, Parts
    from server_patch.dump_dir import RankDir
    from server_patch.layer_hooks import LayerHooks
    from server_patch.sglang_api import RunnerFacts
    from server_patch.weights import Found, Measured, Weights
    from server_patch.writing import Writing

logger = logging.getLogger(__name__)

#: Weights of this process's model; None if the process does not write dumps.
_weights: Weights | None = None


def register() -> None:
    """Register the hooks if the environment asks for it. Raises SettingsError; SGLang logs it."""
    try:
        settings = Settings.from_environ(os.environ)
    except SettingsError as error:
        _report_bad_settings(str(error))
        raise
    if settings is None:
        return
    from server_patch import request_log, sglang_api
    from server_patch.dump_dir import make_boot_id

    request_log.set_level(settings.log_level)

    # The main process comes first; its children inherit the id and so meet in one directory.
    os.environ.setdefault(BOOT_ID, make_boot_id())
    sglang_api.register_after(sglang_api.LOAD_MODEL, _after_load_model)
    sglang_api.register_after(sglang_api.INIT_FORWARD_BATCH, sglang_api.note_prompt_lengths)
    sglang_api.register_weight_hooks(
        before_update=_before_weight_update,
        after_label=_after_weight_label,
        after_late_load=_after_late_load,
    )


def _after_load_model(_result: Any, runner: Any, *_: Any, **__: Any) -> None:
    """Arm the model that `runner` has just loaded. No error here stops the server."""
    from server_patch import sglang_api

    try:
        if sglang_api.is_draft(runner):
            return
        settings = Settings.from_environ(os.environ)
        if settings is None:
            return
        # First, even if arming this rank fails later: other ranks may wait for its part.
        measured = None if sglang_api.loads_weights_later(runner) else _measure(runner)
        _set_up(runner, settings, measured)
    except Exception:
        logger.exception("hidden states: not armed")


def _before_weight_update() -> None:
    """Change the id of the weights: dumps of later forwards carry the new one."""
    if _weights is not None:
        _weights.updated()


def _after_weight_label(version: str) -> None:
    if _weights is not None:
        _weights.labelled(version)


def _after_late_load(runner: Any) -> None:
    from server_patch import sglang_api

    if not sglang_api.is_draft(runner) and Settings.from_environ(os.environ) is not None:
        measured = _measure(runner)
        if _weights is not None:
            _weights.loaded(measured.gather())


def _measure(runner: Any) -> Measured:
    """Compute and publish the fingerprint of this rank's weights."""
    from server_patch import sglang_api
    from server_patch.weights import Measured

    return Measured(lambda: sglang_api.tensor_parallel_ranks(runner), runner.model)


def _set_up(runner: Any, settings: Settings, measured: Measured | None) -> None:
    global _weights
    from server_patch import sglang_api
    from server_patch.capture_points import find_causal
    from server_patch.weights import Weights

    architecture = type(find_causal(runner.model)).__name__
    facts = sglang_api.read_facts(runner, architecture=architecture)
    rank_dir = _make_rank_dir(settings, facts) if facts.placement.is_writer else None
    _weights = None
    if rank_dir is not None:
        found: Found | None = measured.gather() if measured is not None else None
        _weights = Weights(boot_id=rank_dir.boot_id, found=found, version=facts.weight_version)
    rank = _Rank(runner=runner, settings=settings, facts=facts, rank_dir=rank_dir, weights=_weights)
    try:
        rank.arm()
    except Exception as error:
        _refuse(rank_dir, error)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Sets up the capture of this process's model.

    Arming by the model's own setter and installing are the same on every tensor-parallel rank,
    because the engine's capture may contain collectives. The steps of the writer's rank can fail
    there alone, and must then leave the capture in place. Hooks on layers contain no collectives,
    so the other ranks do not install them.
    """

    runner: Any
    settings: Settings
    facts: RunnerFacts
    rank_dir: RankDir | None  # where this rank writes; None where it does not
    weights: Weights | None  # known on the ranks that write

    def arm(self) -> None:
        """Raises EngineError, SettingsError, ArmError: the same on every rank."""
        from server_patch import capture_points, sglang_api

        reasons = sglang_api.refusals(self.runner)
        if reasons:
            raise sglang_api.EngineError("; ".join(reasons))
        num_layers = self.facts.model.num_layers
        boundaries = self.settings.resolve_boundaries(num_layers)
        parts = capture_points.find_parts(self.runner.model, num_layers=num_layers)
        if parts.method not in capture_points.SETTERS:
            reasons = sglang_api.proof_refusals(self.runner)
            if reasons:
                raise capture_points.ArmError(
                    f"{parts.architecture} has no setter for capture points in this SGLang, and "
                    f"another way cannot be proven right: {'; '.join(reasons)}"
                )
        if parts.method is None:
            self._prove(parts, boundaries)
            return
        if boundaries[0] == 0 and not sglang_api.captures_boundary_zero():
            raise sglang_api.EngineError(
                f"SGLang {self.facts.engine.version} cannot capture boundary 0, the embeddings: "
                "leave it out"
            )
        reason = sglang_api.reduction_refusal(self.runner, parts.inner.layers[boundaries[-1]])
        if reason is not None:
            raise sglang_api.EngineError(reason)
        self._begin(parts, capture_points.arm(parts, boundaries))

    def _prove(self, parts: Parts, boundaries: tuple[int, ...]) -> None:
        """Without capture points: record the warm-up's prefill, and use hooks if it proves them.

        READY.json or FAILED.json are written then, before the server says that it is ready.
        """
        from server_patch.capture import install
        from server_patch.capture_audit import Proof
        from server_patch.layer_hooks import LayerHooks
        from server_patch.layer_trace import Proven

        def proven(found: Proven) -> None:
            try:
                uninstall()
                self._begin(
                    parts,
                    LayerHooks(parts, boundaries, stream=found.stream, consumers=found.consumers),
                )
            except Exception as error:
                _refuse(self.rank_dir, error)

        def refused(error: Exception) -> None:
            uninstall()
            _refuse(self.rank_dir, error)

        if self.rank_dir is not None:
            uninstall = install(parts.inner, Proof(parts, proven=proven, refused=refused))

    def _begin(self, parts: Parts, points: CapturePoints | LayerHooks) -> None:
        """Install the capture, and on the writer's rank start writing.

        Capture points that no setter of the model has set are announced when they are proven.
        Raises EngineError, ArmError.
        """
        from server_patch.capture import Capture, NormProbe, install
        from server_patch.capture_audit import PointsAudit
        from server_patch.capture_points import SETTERS, ArmError
        from server_patch.layer_hooks import LayerHooks
        from server_patch.layer_trace import Proven
        from server_patch.writing import start_writing

        keeps_pre = self.settings.last_kind != "post"
        hooked = isinstance(points, LayerHooks)
        norm = parts.final_norm() if keeps_pre and not hooked else None
        writing: Writing | None = None  # of the writer's rank, once it runs

        def wrong(fault: str, found: Proven | None) -> None:
            """Replace the engine's wrong points by hooks on the layers, if those can be used."""
            if writing is None:
                return
            capture.connect(None, None)
            try:
                if found is None:
                    raise ArmError(fault)
                logger.warning("hidden states: %s; using hooks on the layers instead", fault)
                hooks = LayerHooks(
                    parts,
                    points.boundaries,
                    stream=found.stream,
                    consumers=found.consumers,
                    instead_of=None if isinstance(points, LayerHooks) else points,
                )
                capture.change(hooks)
                capture.connect(writing.tap, hooks.probe() if keeps_pre else None)
                writing.announce(hooks.method)
            except Exception as error:
                _refuse(self.rank_dir, error)

        def right() -> None:
            if must_prove and writing is not None:
                try:
                    writing.announce(points.method)
                except Exception as error:
                    capture.connect(None, None)
                    _refuse(self.rank_dir, error)

        must_prove = not hooked and points.method not in SETTERS
        audit = None
        if not hooked:
            audit = PointsAudit(parts, must_prove=must_prove, right=right, wrong=wrong)
        capture = Capture(
            points=points,
            rid_prefix=self.settings.rid_prefix,
            shares_forward=self.facts.placement.shares_forward,
            audit=audit,
        )
        install(parts.inner, capture)
        if self.rank_dir is None or self.weights is None:
            return
        try:
            writing = start_writing(
                settings=self.settings,
                facts=self.facts,
                rank_dir=self.rank_dir,
                weights=self.weights,
                boundaries=points.boundaries,
                method=points.method,
            )
            probe: Probe | None = None
            if keeps_pre:
                probe = points.probe() if isinstance(points, LayerHooks) else NormProbe(norm)
            capture.connect(writing.tap, probe)
            if not must_prove:
                writing.announce(points.method)
        except Exception as error:
            capture.connect(None, None)
            _refuse(self.rank_dir, error)


def _make_rank_dir(settings: Settings, facts: RunnerFacts) -> RankDir | None:
    """Make the directory of this rank; None, with an error in the log, if that fails."""
    from server_patch.dump_dir import RankDirError, make_rank_dir

    try:
        return make_rank_dir(
            settings.dump_dir,
            boot_id=os.environ[BOOT_ID],
            rank=facts.placement.rank,
            num_ranks=facts.engine.dp_size,
            file_mode=settings.file_mode,
            directory_mode=settings.directory_mode,
        )
    except (OSError, RankDirError) as error:
        logger.error("hidden states: nothing will be written: %s", error)
        return None


def _refuse(rank_dir: RankDir | None, error: Exception) -> None:
    """Log why nothing is captured, and write it to FAILED.json for the client."""
    from server_patch.ready import write_failed

    reason = str(error) or repr(error)
    logger.error("hidden states: not captured: %s", reason, exc_info=error)
    if rank_dir is not None:
        try:
            write_failed(rank_dir, reason)
        except OSError as problem:
            logger.error("hidden states: the reason cannot be written: %s", problem)


def _report_bad_settings(reason: str) -> None:
    """Write the reason to FAILED.json as well, if the root and the boot id can be read.

    The first process does it; in the others the directory exists already.
    """
    from server_patch.dump_dir import RankDir, make_boot_id
    from server_patch.ready import write_failed

    root = os.environ.get(DUMP_DIR, "")
    boot_id = os.environ.setdefault(BOOT_ID, make_boot_id())
    directory = Path(root) / boot_id / "0"
    if not directory.is_absolute() or not is_boot_id(boot_id):
        return
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        rank_dir = RankDir(
            directory=directory, boot_id=boot_id, rank=0, file_mode=DEFAULT_FILE_MODE
        )
        write_failed(rank_dir, reason)
    except OSError as error:
        logger.error("hidden states: the reason cannot be written: %s", error)

"""Arms the model that this process has loaded: finds a way to capture its states, and starts the
writers. No error here stops the server.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from server_patch import capture_audit, capture_points, sglang_api
from server_patch.capture import Capture, Probe, install
from server_patch.capture_points import SETTERS, ArmError, CapturePoints, Parts
from server_patch.dump_dir import RankDir, RankDirError, make_rank_dir
from server_patch.layer_hooks import LayerHooks, Proven
from server_patch.norm_probe import NormProbe
from server_patch.ready import write_failed
from server_patch.settings import BOOT_ID, Settings
from server_patch.sglang_api import EngineError, RunnerFacts
from server_patch.weights import UNKNOWN, Measured, Weights
from server_patch.writing import Writing, start_writing

logger = logging.getLogger(__name__)

#: Weights of this process's model; None if the process does not write dumps.
_weights: Weights | None = None


def after_load_model(_result: Any, runner: Any, *_: Any, **__: Any) -> None:
    """Arm the model that `runner` has just loaded."""
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


def before_weight_update() -> None:
    """Change the id of the weights: dumps of later forwards carry the new one."""
    if _weights is not None:
        _weights.updated()


def after_weight_label(version: str) -> None:
    if _weights is not None:
        _weights.labelled(version)


def after_late_load(runner: Any) -> None:
    if not sglang_api.is_draft(runner) and Settings.from_environ(os.environ) is not None:
        measured = _measure(runner)
        if _weights is not None:
            _weights.loaded(measured.gather())


def _measure(runner: Any) -> Measured:
    """Compute and publish the fingerprint of this rank's weights."""
    return Measured(lambda: sglang_api.tensor_parallel_ranks(runner), runner.model)


def _set_up(runner: Any, settings: Settings, measured: Measured | None) -> None:
    global _weights
    architecture = type(capture_points.find_causal(runner.model)).__name__
    facts = sglang_api.read_facts(runner, architecture=architecture)
    rank_dir = _make_rank_dir(settings, facts) if facts.placement.is_writer else None
    _weights = None
    if rank_dir is not None:
        found = measured.gather() if measured is not None else UNKNOWN
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
        if reasons := sglang_api.refusals(self.runner):
            raise EngineError("; ".join(reasons))
        num_layers = self.facts.model.num_layers
        boundaries = self.settings.resolve_boundaries(num_layers)
        parts = capture_points.find_parts(self.runner.model, num_layers=num_layers)
        if parts.method not in SETTERS:
            if reasons := sglang_api.proof_refusals(self.runner):
                raise ArmError(
                    f"{parts.architecture} has no setter for capture points in this SGLang, and "
                    f"another way cannot be proven right: {'; '.join(reasons)}"
                )
        if parts.method is None:
            self._prove(parts, boundaries)
            return
        if boundaries[0] == 0 and not sglang_api.captures_boundary_zero():
            raise EngineError(
                f"SGLang {self.facts.engine.version} cannot capture boundary 0, the embeddings: "
                "leave it out"
            )
        reason = sglang_api.reduction_refusal(self.runner, parts.inner.layers[boundaries[-1]])
        if reason is not None:
            raise EngineError(reason)
        self._begin(parts, capture_points.arm(parts, boundaries))

    def _prove(self, parts: Parts, boundaries: tuple[int, ...]) -> None:
        """Without capture points: record the warm-up's prefill, and use hooks if it proves them.

        READY.json or FAILED.json are written then, before the server says that it is ready.
        """

        def proven(found: Proven) -> None:
            try:
                uninstall()
                self._begin(parts, LayerHooks(parts, boundaries, found))
            except Exception as error:
                _refuse(self.rank_dir, error)

        def refused(error: Exception) -> None:
            uninstall()
            _refuse(self.rank_dir, error)

        if self.rank_dir is not None:
            proof = capture_audit.Proof(parts, proven=proven, refused=refused)
            uninstall = install(parts.inner, proof.run)

    def _begin(self, parts: Parts, points: CapturePoints | LayerHooks) -> None:
        """Install the capture, and on the writer's rank start writing.

        Capture points that no setter of the model has set are announced when they are proven.
        Raises EngineError, ArmError.
        """
        keeps_pre = self.settings.last_kind != "post"
        if keeps_pre:
            parts.final_norm()  # raises on every rank alike
        writing: Writing | None = None  # of the writer's rank, once it runs

        def probe_of(points: CapturePoints | LayerHooks) -> Probe | None:
            if not keeps_pre:
                return None
            return (
                points.probe() if isinstance(points, LayerHooks) else NormProbe(parts.final_norm())
            )

        def give_up(error: Exception) -> None:
            capture.connect(None, None)
            _refuse(self.rank_dir, error)

        def wrong(fault: str, found: Proven | None) -> None:
            """Replace the engine's wrong points by hooks on the layers, if those can be used."""
            if writing is None:
                return
            try:
                if found is None:
                    raise ArmError(fault)
                logger.warning("hidden states: %s; using hooks on the layers instead", fault)
                assert isinstance(points, CapturePoints)
                hooks = LayerHooks(parts, points.boundaries, found, instead_of=points)
                capture.change(hooks)
                capture.connect(writing.tap, probe_of(hooks))
                writing.announce(hooks.method)
            except Exception as error:
                give_up(error)

        def right() -> None:
            if must_prove and writing is not None:
                try:
                    writing.announce(points.method)
                except Exception as error:
                    give_up(error)

        audit = None
        must_prove = False
        if isinstance(points, CapturePoints):
            must_prove = points.method not in SETTERS
            audit = capture_audit.PointsAudit(
                parts, must_prove=must_prove, right=right, wrong=wrong
            )
        capture = Capture(
            points=points,
            rid_prefix=self.settings.rid_prefix,
            shares_forward=self.facts.placement.shares_forward,
            audit=audit,
        )
        install(parts.inner, capture.run)
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
            capture.connect(writing.tap, probe_of(points))
            if not must_prove:
                writing.announce(points.method)
        except Exception as error:
            give_up(error)


def _make_rank_dir(settings: Settings, facts: RunnerFacts) -> RankDir | None:
    """Make the directory of this rank; None, with an error in the log, if that fails."""
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
    reason = str(error) or repr(error)
    logger.error("hidden states: not captured: %s", reason, exc_info=error)
    if rank_dir is not None:
        try:
            write_failed(rank_dir, reason)
        except OSError as problem:
            logger.error("hidden states: the reason cannot be written: %s", problem)

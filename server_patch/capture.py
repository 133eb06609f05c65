"""Wraps the forward of the inner model, so that a captured forward returns the plain result.

A server with the plugin must answer like one without it. The wrapper therefore returns the result
of the unpatched forward, and switches the engine's capture points on only for the forwards that
hold requests of ours; every other forward, captured decode graphs included, runs the plain model.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from server_patch import sglang_api
from server_patch.capture_audit import PointsAudit
from server_patch.capture_points import CapturePoints
from server_patch.layer_hooks import LastLayerProbe, LayerHooks
from server_patch.norm_probe import NormProbe
from server_patch.spans import is_ours
from server_patch.staging import States
from server_patch.tap import Tap

logger = logging.getLogger(__name__)


Points = CapturePoints | LayerHooks
#: Keeps h[n] of one forward.
Probe = NormProbe | LastLayerProbe


class Capture:
    """Runs each forward, captures those that hold requests of ours, and passes the states to the
    tap."""

    def __init__(
        self,
        *,
        points: Points,
        rid_prefix: str,
        shares_forward: bool,
        audit: PointsAudit | None = None,
    ) -> None:
        """shares_forward: under DP attention the ranks of one forward hold different requests, and
        capturing may complete a reduction over all of them. They must then decide alike, by what
        they all know.
        audit: looks at the first prefill of a request, whoever's it is, which is captured for that.
        """
        self._points = points
        self._rid_prefix = rid_prefix
        self._shares_forward = shares_forward
        self._audit = audit
        self._tap: Tap | None = None
        self._probe: Probe | None = None
        self._failed = False

    def connect(self, tap: Tap | None, probe: Probe | None) -> None:
        """Pass the states to `tap` from now on. Without one (other ranks) they are dropped."""
        self._tap = tap
        self._probe = probe

    def change(self, points: Points) -> None:
        """Capture in another way from the next forward on."""
        self._points = points

    def run(self, forward_batch: Any, call: Callable[[], Any]) -> Any:
        """Run the original forward, `call()`, and return its plain result."""
        ours = self._holds_ours(forward_batch)
        audit = self._audit if self._is_auditable(forward_batch) else None
        armed = sglang_api.any_rank_prefills(forward_batch) if self._shares_forward else ours
        if not (armed or audit is not None):
            return call()
        tap = self._tap if ours else None
        points, probe = self._points, self._probe if tap is not None else None
        if probe is not None:
            probe.listen()
        with ExitStack() as stack:
            stack.enter_context(points.active())
            if audit is not None:
                self._audit = None
                stack.enter_context(audit.tracing())
            result = call()
        hidden, aux = points.split(result)
        fault = audit.find_fault(points.boundaries, hidden, aux) if audit is not None else None
        if tap is not None and fault is not None:
            if probe is not None:
                probe.take()
            _refuse(tap, sglang_api.request_ids(forward_batch), fault)
        elif tap is not None:
            _hand_over(tap, forward_batch, hidden, aux, probe)
        return hidden

    def _is_auditable(self, forward_batch: Any) -> bool:
        """Whether this is the first prefill of a request; the same on all ranks of a
        tensor-parallel group."""
        if self._audit is None:
            return False
        with suppress(Exception):
            return sglang_api.is_prefill(forward_batch) and bool(
                sglang_api.request_ids(forward_batch)
            )
        return False

    def _holds_ours(self, forward_batch: Any) -> bool:
        """Whether this forward extends a prompt of ours."""
        try:
            return sglang_api.is_prefill(forward_batch) and any(
                is_ours(rid, self._rid_prefix) for rid in sglang_api.request_ids(forward_batch)
            )
        except Exception:
            # The same error may occur in every forward, decode steps too: log it once.
            if not self._failed:
                logger.exception("hidden states: cannot inspect a forward batch; not capturing it")
            self._failed = True
            return False


def _hand_over(
    tap: Tap, forward_batch: Any, last: torch.Tensor, aux: Any, probe: Probe | None
) -> None:
    """Give one forward's states to `tap`; whatever fails is recorded, never raised."""
    rids: Sequence[str] = ()
    try:
        rids = sglang_api.request_ids(forward_batch)
        last_pre = probe.take() if probe is not None else None
        if aux is None:
            tap.refuse(rids, "the engine captured nothing in this forward")
            return
        batch = sglang_api.read_batch(forward_batch)
        states = States(aux=aux, last=last, last_pre=last_pre, input_ids=batch.input_ids)
        tap.take(batch, states)
    except Exception as error:
        _refuse(tap, rids, f"the forward cannot be handed over: {error}")


def _refuse(tap: Tap, rids: Sequence[str], reason: str) -> None:
    try:
        tap.refuse(rids, reason)
    except Exception:
        logger.exception("hidden states: cannot record an error of the capture: %s", reason)


#: Runs the forward of a batch, given the original forward of that batch; returns its plain result.
Run = Callable[[Any, Callable[[], Any]], Any]


def install(inner: Any, run: Run) -> Callable[[], None]:
    """Replace `inner.forward` on the instance by one that goes through `run`.

    Returns a function that restores the original. Raises EngineError.
    """
    original = inner.forward
    names = list(inspect.signature(original).parameters)
    if "forward_batch" not in names:
        raise sglang_api.EngineError(
            f"{type(inner).__name__}.forward takes no forward_batch: {names}"
        )
    position = names.index("forward_batch")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if "forward_batch" in kwargs:
            forward_batch = kwargs["forward_batch"]
        else:
            forward_batch = args[position]
        return run(forward_batch, lambda: original(*args, **kwargs))

    inner.forward = forward

    def uninstall() -> None:
        del inner.forward

    return uninstall

"""Finding out, on one real forward, whether hooks on the layers would store the residual stream.

The engine warms up with a prompt before it serves; that forward is watched at every layer. What is
proven, for this model in this process:

1. the layers run once each, in order, and each is given exactly what the one before returned, so
   nothing is added, scaled or dropped between them;
2. each layer hands its state, untouched, to the first module in it (its norm, or its attention
   where the norm comes later); for a norm, the norm of what would be stored is what it returned.
   That tells the streams of `layer_hooks` apart: the norm of a part of the sum is another;
3. where a sum is the stream, the norm hands that very sum on as the new residual: what is stored is
   also what the layer adds to;
4. the final norm of the same stream after the last layer is what the model returns.

`layer_trace` has the checks. What they cannot prove is that the engine's model computes what its
authors meant; docs/models.md lists the architectures whose states were compared with Hugging Face.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from server_patch import sglang_api
from server_patch.capture_points import Parts
from server_patch.layer_hooks import LayerSignature
from server_patch.layer_trace import LayerTrace, Proven

logger = logging.getLogger(__name__)


class Proof:
    """Watches the first prefill of a request of a model without capture points, then calls back.

    In the place of `capture.Capture` until then; the forward's result is the plain one throughout.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        proven: Callable[[Proven], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """proven, refused: one is called once, on the forward thread, and must not raise.
        Raises ArmError for a model that cannot be watched.
        """
        for layer in parts.inner.layers:
            LayerSignature(layer)
        self._trace: LayerTrace | None = LayerTrace(parts)
        parts.final_norm()
        self._proven = proven
        self._refused = refused

    def run(self, forward_batch: Any, call: Callable[[], Any]) -> Any:
        """`call()` is the original forward, and its result is returned."""
        trace = self._trace
        if trace is None or not (
            sglang_api.is_prefill(forward_batch) and sglang_api.request_ids(forward_batch)
        ):
            return call()
        self._trace = None
        with trace.tracing():
            result = call()
        try:
            found = trace.judge(result)
        except Exception as error:
            self._refused(error)
        else:
            self._proven(found)
        return result


class PointsAudit:
    """Checks the engine's own capture on the first prefill of a request.

    A state at boundary b is right only if it is what layer b worked on: its norm must be what the
    layer's first norm returned. An engine whose models changed and whose capture points did not
    follow fails that, and so does a point one layer off. Where the norm runs within another kernel
    nothing can be said, and the engine is believed.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        must_prove: bool,
        right: Callable[[], None],
        wrong: Callable[[str, Proven | None], None],
    ) -> None:
        """must_prove: what cannot be checked is wrong.
        right, wrong: one is called once, on the forward thread, and must not raise. wrong is told
            what is, and what hooks on the layers need if they would do instead.
        """
        self._trace = LayerTrace(parts)
        self._must_prove = must_prove
        self._right = right
        self._wrong = wrong

    def tracing(self) -> AbstractContextManager[None]:
        return self._trace.tracing()

    def find_fault(self, boundaries: Sequence[int], hidden: Any, aux: Any) -> str | None:
        try:
            fault = self._trace.compare(boundaries, hidden, aux)
        except Exception as error:
            logger.warning("hidden states: the capture cannot be audited: %r", error)
            fault = None if not self._must_prove else f"the capture cannot be audited: {error!r}"
        else:
            if fault is None and self._must_prove and self._trace.proven != list(boundaries):
                fault = f"of the boundaries {list(boundaries)} only {self._trace.proven} are proven"
        if fault is None:
            self._tell(boundaries)
            self._right()
            return None
        try:
            found = self._trace.judge(hidden)
        except Exception as error:
            fault = f"{fault}. {error}"
            found = None
        self._wrong(fault, found)
        return fault

    def _tell(self, boundaries: Sequence[int]) -> None:
        proven = self._trace.proven
        believed = [boundary for boundary in boundaries if boundary not in proven]
        if believed:
            logger.warning(
                "hidden states: boundaries %s proven; for %s the engine is believed, their norm "
                "runs within another kernel (fused all-reduce, for one)",
                proven,
                believed,
            )
        else:
            logger.info("hidden states: boundaries %s proven", proven)

"""Proves on one real forward that the captured states are the residual stream.

The engine warms up with a prompt before it serves; hooks record that forward at every layer. This
proves, for this model in this process:

1. the layers run once each, in order, and each is given exactly what the one before returned, so
   nothing is added, scaled or dropped between them;
2. each layer passes its state unchanged to the first module in it (its norm, or its attention
   where the norm comes later); a norm returned the norm of the state that would be stored. This
   distinguishes the streams of `layer_hooks`: the norm of a part of the sum is different;
3. where the stream is a sum, the norm passes that very sum on as the new residual, so the layer
   adds to the state that is stored;
4. the model returns the final norm of the same stream after the last layer.

`layer_trace` has the checks. They cannot prove that the engine's model computes what its authors
meant; docs/models.md lists the architectures whose states were compared with Hugging Face.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from server_patch import sglang_api
from server_patch.capture_points import Parts
from server_patch.layer_hooks import LayerSignature, Proven
from server_patch.layer_trace import LayerTrace

logger = logging.getLogger(__name__)


class Proof:
    """Records the first prefill of a model without capture points, then reports the outcome.

    It replaces `capture.Capture` until then; every forward returns the plain result.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        proven: Callable[[Proven], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """proven, refused: one is called once, on the forward thread, and must not raise.
        Raises ArmError for a model whose layers cannot be recorded.
        """
        for layer in parts.inner.layers:
            LayerSignature(layer)
        self._trace: LayerTrace | None = LayerTrace(parts)
        parts.final_norm()
        self._proven = proven
        self._refused = refused

    def run(self, forward_batch: Any, call: Callable[[], Any]) -> Any:
        """Run the original forward, `call()`, and return its result."""
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

    A state at boundary b is right only if layer b worked on it: its norm must equal the output of
    the layer's first norm. The check detects a capture point that is one layer off, and one that
    did not follow a change of the model. Where the norm runs within another kernel the check is
    impossible, and the engine is trusted.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        must_prove: bool,
        right: Callable[[], None],
        wrong: Callable[[str, Proven | None], None],
    ) -> None:
        """must_prove: treat a boundary that cannot be checked as wrong.
        right, wrong: one is called once, on the forward thread, and must not raise. wrong gets the
            fault, and the facts that hooks on the layers need if they can be used instead.
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
            self._log(boundaries)
            self._right()
            return None
        try:
            found = self._trace.judge(hidden)
        except Exception as error:
            fault = f"{fault}. {error}"
            found = None
        self._wrong(fault, found)
        return fault

    def _log(self, boundaries: Sequence[int]) -> None:
        proven = self._trace.proven
        trusted = [boundary for boundary in boundaries if boundary not in proven]
        if trusted:
            logger.warning(
                "hidden states: boundaries %s proven; %s cannot be checked, because their norm "
                "runs within another kernel (such as a fused all-reduce): trusting the engine",
                proven,
                trusted,
            )
        else:
            logger.info("hidden states: boundaries %s proven", proven)

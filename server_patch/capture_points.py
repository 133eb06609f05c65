"""Sets the engine's own capture points, and reads back which boundaries were really set.

Models interpret the argument of `set_eagle3_layers_to_capture` differently: most add one, DeepSeek
adds one only if the first id is 1, Qwen-MoE and others also leave a flag on each layer. The ids are
therefore tried, and the result is read back, until it equals the boundaries that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

SETTER: Final = "set_eagle3_layers_to_capture"
#: In the order of preference. Some models have capture points for other drafters only.
SETTERS: Final = (SETTER, "set_dflash_layers_to_capture")
_OUTER_FLAG: Final = "capture_aux_hidden_states"
_LIST: Final = "layers_to_capture"
_LAYER_FLAG: Final = "_is_layer_to_capture"
_FINAL_NORMS: Final = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f", "embedding_norm")


class ArmError(RuntimeError):
    """The states of this model cannot be captured as asked; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The modules of a loaded model that take part in capturing."""

    outer: Any  # the module that the engine calls; may be a multimodal wrapper
    causal: Any  # owns the setter, if there is one
    inner: Any  # the layer stack: while it captures, its forward returns (hidden, aux)

    @property
    def architecture(self) -> str:
        return type(self.causal).__name__

    @property
    def method(self) -> str | None:
        """The way to set the capture points: the name of a setter, or of the list in a layer stack
        that captures but has no setter; None for a model without capture points."""
        setter = _setter_of(self.causal)
        if setter is not None:
            return setter
        return _LIST if isinstance(getattr(self.inner, _LIST, None), list) else None

    def inner_norm(self) -> Any:
        """The norm after the last layer; None if its name is unknown."""
        norms = (getattr(self.inner, name, None) for name in _FINAL_NORMS)
        return next((norm for norm in norms if norm is not None), None)

    def final_norm(self) -> Any:
        """The norm after the last layer. Raises ArmError."""
        norm = self.inner_norm()
        if norm is not None:
            return norm
        raise ArmError(f"{type(self.inner).__name__} has none of {_FINAL_NORMS} as its final norm")


def find_causal(model: Any) -> Any:
    """The causal LM within `model`, which may be a multimodal wrapper of it."""
    language_model = getattr(model, "language_model", None)
    owners = [owner for owner in (language_model, model) if owner is not None]
    # Of those without a setter, the language model within a wrapper is the one with the layers.
    return next((owner for owner in owners if _setter_of(owner) is not None), owners[0])


def find_parts(model: Any, *, num_layers: int) -> Parts:
    """The causal LM and its layer stack within `model`. Raises ArmError."""
    language_model = getattr(model, "language_model", None)
    causal = find_causal(model)
    for inner in (getattr(causal, "model", None), language_model, causal):
        layers = getattr(inner, "layers", None)
        if layers is not None and len(layers) == num_layers:
            return Parts(outer=model, causal=causal, inner=inner)
    raise ArmError(f"{type(model).__name__} has no inner model with {num_layers} layers")


def _setter_of(owner: Any) -> str | None:
    return next((name for name in SETTERS if callable(getattr(owner, name, None))), None)


class CapturePoints:
    """The armed capture points of one model, switched on only around forwards that need them.

    Off is the state a plain server is in, so decode steps, captured graphs and other people's
    prefills run exactly the plain model. The engine's code reads the points in every forward.
    """

    def __init__(
        self, parts: Parts, boundaries: Sequence[int], *, by_flags: bool, plain: Any
    ) -> None:
        """plain: the model's list of points before anything touched it."""
        inner = parts.inner
        self.method = str(parts.method)
        self.boundaries = tuple(boundaries)
        self._inner = inner
        self._layers = [inner.layers[index] for index in self.boundaries] if by_flags else []
        self._points = list(boundaries)
        self._plain = plain

    def switch(self, on: bool) -> None:
        setattr(self._inner, _LIST, self._points if on else self._plain)
        for layer in self._layers:
            setattr(layer, _LAYER_FLAG, on)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The points are set inside the block."""
        self.switch(True)
        try:
            yield
        finally:
            self.switch(False)

    def split(self, result: Any) -> tuple[Any, Any]:
        """(what the plain forward returns, the states) of the forward in `active`.

        The states are as the engine returned them, None where it captured nothing.
        """
        if isinstance(result, tuple) and len(result) == 2:
            return result
        return result, None


def arm(parts: Parts, boundaries: Sequence[int]) -> CapturePoints:
    """Set capture points at exactly `boundaries`, switched off. Raises ArmError.

    The outer models' own flags end as they were: the tuple never leaves the inner model.
    """
    wanted = list(boundaries)
    inner = parts.inner
    plain = getattr(inner, _LIST, [])
    flags = _OuterFlags((parts.outer, parts.causal, inner))
    if flags.any_on():
        raise ArmError(f"{_OUTER_FLAG} is already on: something else captures aux states")
    if parts.method == _LIST:
        return CapturePoints(parts, wanted, by_flags=False, plain=plain)
    try:
        _reach(parts, wanted)
        by_flags = bool(_flagged(inner))
    finally:
        _clear(inner)
        setattr(inner, _LIST, plain)
        flags.restore()
    return CapturePoints(parts, wanted, by_flags=by_flags, plain=plain)


def _reach(parts: Parts, wanted: list[int]) -> None:
    """Call the setter until `wanted` is read back. Raises ArmError."""
    inner = parts.inner
    tried = []
    # Most models turn an "output of layer k" id into boundary k + 1; some take it as it is.
    got: list[int] = []
    for ids in ([boundary - 1 for boundary in wanted], wanted):
        _clear(inner)
        try:
            getattr(parts.causal, str(parts.method))(list(ids))
        except Exception as error:
            tried.append(f"ids {ids} raised {error!r}")
            continue
        got = read_back(inner)
        if got == wanted:
            return
        tried.append(f"ids {ids} gave {got}")
    # The setter has run, so the model is set up; a plain list of numbers can be put right by hand.
    if got and not _flagged(inner) and isinstance(getattr(inner, _LIST, None), list):
        setattr(inner, _LIST, list(wanted))
        return
    raise ArmError(f"{parts.architecture}: boundaries {wanted} not reached: {'; '.join(tried)}")


class _OuterFlags:
    """The flags that make outer models expect a tuple from the inner one, with their first
    values."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._found = [(owner, getattr(owner, _OUTER_FLAG, None)) for owner in owners]

    def any_on(self) -> bool:
        return any(value is True for _, value in self._found)

    def restore(self) -> None:
        for owner, value in self._found:
            if getattr(owner, _OUTER_FLAG, None) is value:
                continue  # untouched, or a property that follows the points
            if value is not None:
                setattr(owner, _OUTER_FLAG, value)
            else:
                delattr(owner, _OUTER_FLAG)


def read_back(inner: Any) -> list[int]:
    """The boundaries that are set now: the layers' flags where a model uses them, else its list."""
    flagged = _flagged(inner)
    if flagged:
        return flagged
    return sorted(int(index) for index in getattr(inner, _LIST, None) or ())


def _flagged(inner: Any) -> list[int]:
    return [i for i, layer in enumerate(inner.layers) if getattr(layer, _LAYER_FLAG, False)]


def _clear(inner: Any) -> None:
    """Undo a setter: an earlier try's flags would add boundaries of their own."""
    setattr(inner, _LIST, [])
    for layer in inner.layers:
        if getattr(layer, _LAYER_FLAG, False):
            setattr(layer, _LAYER_FLAG, False)

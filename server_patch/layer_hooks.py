"""The fallback for models without the engine's aux capture: hooks on the decoder layers.

A layer is entered with `hidden_states`, and in many models with a `residual` that is still to be
added to it; in newer ones the engine keeps the residual, and hands it to the layer's first norm.
The parts of the residual stream are never assumed: `capture_audit` determines them on a real
forward, and nothing is captured before.

Hooks are registered around the forwards that need them and removed again, so every other forward
runs the plain model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from server_patch.capture_points import ArmError, CapturePoints, Parts
from server_patch.norm_probe import NormProbe

#: The name of this way of capturing in READY.json.
METHOD: Final = "decoder_layer_hooks"

#: sum: hidden_states + residual. plain: hidden_states, whatever else is handed on.
#: apart: hidden_states + the other tensor that the layer's first norm is given.
Stream = Literal["sum", "plain", "apart"]

#: Parameters of a layer that cannot hold a part of the residual stream besides the two that do.
_KNOWN: Final = {
    "positions", "position_ids", "hidden_states", "forward_batch", "residual", "layer_id",
    "position_embeddings_global", "position_embeddings_local",
}  # fmt: skip


class LayerSignature:
    """The arguments in which a decoder layer takes its state."""

    def __init__(self, layer: Any) -> None:
        """Raises ArmError for a layer that may take more of its state than the two tensors."""
        # The content of **kwargs is known when the layer is called.
        parameters = inspect.signature(layer.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = type(layer).__name__
        if "hidden_states" not in names:
            raise ArmError(f"{kind}.forward takes no hidden_states: {names}")
        unknown = [name for name in names if name not in _KNOWN]
        if unknown:
            raise ArmError(f"{kind}.forward takes {', '.join(unknown)}: its state may be there too")
        self._names = names

    def state(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden_states, residual) of one call. Raises ArmError for arguments of other names."""
        unknown = sorted(set(kwargs) - _KNOWN)
        if unknown:
            raise ArmError(f"a layer is given {', '.join(unknown)}: its state may be there too")
        return self._argument("hidden_states", args, kwargs), self._argument(
            "residual", args, kwargs
        )

    def _argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        if name not in self._names:
            return None
        index = self._names.index(name)
        return args[index] if index < len(args) else None


def stream_of(stream: Stream, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream [T, H], in memory of its own: layers write to their arguments."""
    if stream == "sum" and residual is not None:
        return hidden + residual
    return hidden.clone()


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Floating-point tensors among arguments or results."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if not isinstance(values, tuple | list):
        values = [values]
    return [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]


def states_given(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The [rows, hidden] tensors that a module is called with, each once."""
    found = (t for t in (*tensors_of(args), *tensors_of(kwargs)) if t.dim() == 2)
    return list({tensor.data_ptr(): tensor for tensor in found}.values())


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, in memory of its own."""
    first, *rest = parts
    return functools.reduce(torch.add, rest, first) if rest else first.clone()


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The facts that hooks on the layers need to capture the stream."""

    stream: Stream
    consumers: list[Any]  # per layer, the module within it that takes its state


class LayerHooks:
    """Capture points by hooks; the counterpart of `capture_points.CapturePoints`."""

    method = METHOD

    def __init__(
        self,
        parts: Parts,
        boundaries: Sequence[int],
        proven: Proven,
        *,
        instead_of: CapturePoints | None = None,
    ) -> None:
        """instead_of: capture points that stay in use, because those of other ranks do; their
            states are dropped.
        Raises ArmError.
        """
        self._instead_of = instead_of
        self.boundaries = tuple(boundaries)
        self._parts = parts
        self._stream = proven.stream
        layers = [parts.inner.layers[boundary] for boundary in boundaries]
        self._layers = [(layer, LayerSignature(layer)) for layer in layers]
        self._consumers = [proven.consumers[boundary] for boundary in boundaries]
        self._states: list[torch.Tensor | None] = []
        #: Storage that each boundary's consumer has still to be given.
        self._owed: list[set[int]] = []
        self._broken = ""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forwards inside the block are captured."""
        self._states = [None] * len(self._layers)
        self._owed = [set() for _ in self._layers]
        self._broken = ""
        handles = []
        others = self._instead_of.active() if self._instead_of is not None else nullcontext()
        try:
            for index, (layer, _) in enumerate(self._layers):
                hook = functools.partial(self._before_layer, index)
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
                hook = functools.partial(self._before_consumer, index)
                consumer = self._consumers[index]
                handles.append(consumer.register_forward_pre_hook(hook, with_kwargs=True))
            with others:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def split(self, result: Any) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """(the forward's result, the states of the boundaries) of the forward in `active`.

        The states are None where this forward ran otherwise than the one that was proven.
        """
        if self._instead_of is not None:
            result, _ = self._instead_of.split(result)
        states, self._states = self._states, []
        taken = [state for state in states if state is not None]
        if self._broken or len(taken) < len(states) or any(self._owed):
            return result, None
        return result, taken

    def probe(self) -> NormProbe | LastLayerProbe:
        """A probe for h[n] of the same model."""
        if self._stream == "apart":
            return NormProbe(self._parts.final_norm())
        return LastLayerProbe(self._parts, self._stream)

    def _before_layer(self, index: int, _: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        try:
            hidden, residual = self._layers[index][1].state(args, kwargs)
            if self._states[index] is not None:
                self._broken = f"boundary {self.boundaries[index]} was entered twice"
            if self._stream != "apart":
                self._states[index] = stream_of(self._stream, hidden, residual)
            self._owed[index] = owed(self._stream, hidden, residual)
        except Exception as error:
            self._broken = repr(error)

    def _before_consumer(self, index: int, _: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        try:
            given = states_given(args, kwargs)
            self._owed[index] -= {tensor.data_ptr() for tensor in given}
            if self._stream == "apart":
                # Before the first layer there is nothing to be kept apart.
                if len(given) != (2 if self.boundaries[index] > 0 else 1):
                    self._broken = f"boundary {self.boundaries[index]} is made of {len(given)}"
                self._states[index] = total(given)
        except Exception as error:
            self._broken = repr(error)


def owed(stream: Stream, hidden: torch.Tensor, residual: torch.Tensor | None) -> set[int]:
    """Addresses of the tensors that a layer must pass to its consumer, to use the stored state.

    A kernel that fuses the norm with something else bypasses the module, and then computes on
    other numbers than those that the layer was given.
    """
    pointers = {hidden.data_ptr()}
    if stream == "sum" and residual is not None:
        pointers.add(residual.data_ptr())
    return pointers


class LastLayerProbe:
    """Keeps h[n], computed from the output of the last layer; the counterpart of `NormProbe`."""

    def __init__(self, parts: Parts, stream: Stream) -> None:
        self._layer = parts.inner.layers[-1]
        self._stream: Stream = stream
        self._seen: torch.Tensor | None = None
        self._handle: Any = None

    def listen(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._seen = None
        self._handle = self._layer.register_forward_hook(self._after_layer)

    def take(self) -> torch.Tensor | None:
        """h[n] [T, H] of the forward since `listen`, or None if the layer was not called."""
        self._handle.remove()
        seen, self._seen = self._seen, None
        return seen

    def _after_layer(self, _module: Any, _inputs: Any, output: Any) -> None:
        # Raised here, an error would be the model's: the sum takes memory, and there may be none.
        with suppress(Exception):
            hidden, residual = (*tensors_of(output), None)[:2]
            if hidden is not None:
                self._seen = stream_of(self._stream, hidden, residual)

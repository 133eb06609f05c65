"""Records the inputs and outputs of every decoder layer in one forward, and checks them.

Nothing here changes the forward: hooks copy the first rows of the tensors that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from server_patch.capture_points import ArmError, Parts
from server_patch.layer_hooks import (
    LayerSignature,
    Proven,
    Stream,
    owed,
    states_given,
    stream_of,
    tensors_of,
    total,
)

_STREAMS: Final[tuple[Stream, ...]] = ("sum", "plain", "apart")
#: Rows that are looked at. A prompt can be thousands of rows long, and a model a hundred layers.
_ROWS: Final = 16
#: Share of elements that must agree.
_MOST: Final = 0.99


@dataclass(kw_only=True)
class _Consumer:
    """The first of a layer's own modules that was called. Tensors are copies of the first rows."""

    module: Any = None  # None if none was called
    given: list[int] = field(default_factory=list)  # addresses of its [rows, hidden] arguments
    given_total: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # and their sum
    output: list[torch.Tensor] = field(default_factory=list)
    output_rows: int = 0  # of all its output

    @property
    def is_norm(self) -> bool:
        return "norm" in type(self.module).__name__.lower()


@dataclass(kw_only=True)
class _Visit:
    """One call of one layer. Tensors are copies of the first rows."""

    index: int
    rows: int = 0
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    residual: torch.Tensor | None = None
    owed: dict[Stream, set[int]] = field(default_factory=dict)  # see `layer_hooks.owed`
    consumer: _Consumer = field(default_factory=lambda: _Consumer())
    output: list[torch.Tensor] = field(default_factory=list)

    def stream(self, stream: Stream) -> torch.Tensor:
        if stream == "apart":
            return self.consumer.given_total
        return stream_of(stream, self.hidden, self.residual)


class LayerTrace:
    """The hooks on every layer for one forward, and the tensors that they saw."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._kind = parts.architecture
        self._visits: list[_Visit] = []
        self._inside: _Visit | None = None
        self._norm_given: list[torch.Tensor] = []
        self._norm_outputs: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._handles: list[Any] = []
        self.proven: list[int] = []  # boundaries that `compare` found right

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Record the forward inside the block."""
        try:
            for index, layer in enumerate(self._parts.inner.layers):
                self._on(layer.register_forward_pre_hook, self._enter, index)
                self._on(layer.register_forward_hook, self._leave, index)
                for child in layer.children():
                    self._on(child.register_forward_pre_hook, self._enter_child, child)
                    self._on(child.register_forward_hook, self._leave_child, child)
            norm = self._parts.inner_norm()
            if norm is not None:
                self._on(norm.register_forward_pre_hook, self._before_norm, None)
                self._on(norm.register_forward_hook, self._after_norm, None)
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _on(self, register: Any, hook: Callable[..., None], subject: Any) -> None:
        def safely(_module: Any, *seen: Any) -> None:
            try:
                hook(subject, *seen)
            except Exception as error:  # the engine's forward must not notice
                self._error = self._error or error

        self._handles.append(register(safely, with_kwargs=True))

    # ---- recording -----------------------------------------------------------------------------

    def _enter(self, index: int, args: Any, kwargs: Any) -> None:
        visit = self._inside = _Visit(index=index)
        self._visits.append(visit)
        hidden, residual = LayerSignature(self._parts.inner.layers[index]).state(args, kwargs)
        if hidden.dim() != 2 or (residual is not None and residual.shape != hidden.shape):
            raise ArmError(
                f"layer {index} is entered with {list(hidden.shape)}, which is no [rows, hidden]"
            )
        visit.rows = hidden.shape[0]
        visit.hidden = _head(hidden)
        visit.residual = None if residual is None else _head(residual)
        visit.owed = {stream: owed(stream, hidden, residual) for stream in _STREAMS}

    def _enter_child(self, child: Any, args: Any, kwargs: Any) -> None:
        visit = self._inside
        if visit is not None and visit.consumer.module is None:
            consumer = visit.consumer
            consumer.module = child
            given = states_given(args, kwargs)
            consumer.given = [tensor.data_ptr() for tensor in given]
            if given:
                consumer.given_total = total([_head(tensor) for tensor in given])

    def _leave_child(self, child: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        visit = self._inside
        consumer = visit.consumer if visit is not None else None
        if consumer is not None and consumer.module is child and not consumer.output:
            tensors = tensors_of(output)
            consumer.output = [_head(tensor) for tensor in tensors]
            consumer.output_rows = tensors[0].shape[0] if tensors else 0

    def _leave(self, _index: int, _args: Any, _kwargs: Any, output: Any) -> None:
        assert self._inside is not None
        self._inside.output = [_head(tensor) for tensor in tensors_of(output)]
        self._inside = None

    def _before_norm(self, _subject: Any, args: Any, kwargs: Any) -> None:
        self._norm_given = [_head(tensor) for tensor in states_given(args, kwargs)]

    def _after_norm(self, _subject: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        self._norm_outputs.append(_head(tensors_of(output)[0]))

    # ---- checking --------------------------------------------------------------------------------

    def compare(self, boundaries: Sequence[int], hidden: torch.Tensor, aux: Any) -> str | None:
        """Describe the first state that its layer did not work on; None if all are right."""
        if aux is None:
            return None  # recorded for each request
        width = hidden.shape[1]
        if isinstance(aux, torch.Tensor):
            aux = [aux[:, i * width : (i + 1) * width] for i in range(len(boundaries))]
        for boundary, state in zip(boundaries, aux, strict=True):
            visits = [visit for visit in self._visits if visit.index == boundary]
            if len(visits) != 1 or not visits[0].consumer.is_norm:
                continue
            consumer = visits[0].consumer
            # Spread over the ranks, or quantised on the way out: something else to look at.
            if consumer.output_rows != len(state):
                continue
            output = consumer.output[0]
            if (output.shape[1:], output.dtype) != (state.shape[1:], state.dtype):
                continue
            if not _close(_apply(consumer.module, _head(state)), output):
                return (
                    f"{self._kind}: SGLang's own capture at boundary {boundary} is not the state "
                    "that the layer works on"
                )
            self.proven.append(boundary)
        return None

    def judge(self, result: Any) -> Proven:
        """Determine how hooks can capture. Raises ArmError with the reason if they cannot, or the
        error of a hook."""
        if self._error is not None:
            raise self._error
        self._check_order(result)
        stream = self._find_stream()
        for visit in self._visits:
            self._check_visit(visit, stream)
        self._check_end(stream, result)
        return Proven(stream=stream, consumers=[visit.consumer.module for visit in self._visits])

    def _check_order(self, result: Any) -> None:
        order = [visit.index for visit in self._visits]
        if order != list(range(len(self._parts.inner.layers))):
            raise self._no(f"its layers do not run once each, in order, but as {order}")
        if not isinstance(result, torch.Tensor):
            raise self._no(f"its forward returns a {type(result).__name__}")
        for visit in self._visits:
            if visit.rows != result.shape[0]:
                raise self._no(
                    f"layer {visit.index} sees {visit.rows} rows of {result.shape[0]}: they are "
                    "spread over the ranks"
                )
        for before, after in zip(self._visits, self._visits[1:], strict=False):
            handed_on = [after.hidden] + ([] if after.residual is None else [after.residual])
            returned = before.output[: len(handed_on)]
            if len(returned) < len(handed_on) or not all(map(torch.equal, returned, handed_on)):
                raise self._no(
                    f"layer {after.index} is not entered with what layer {before.index} returned"
                )

    def _find_stream(self) -> Stream:
        """The stream that layers pass to their first module; the first layer does not show it."""
        later = self._visits[1:]
        apart = {bool(set(visit.consumer.given) - visit.owed["sum"]) for visit in later}
        both = {
            visit.owed["sum"] <= set(visit.consumer.given)
            for visit in later
            if visit.owed["sum"] != visit.owed["plain"]
        }
        if len(apart) > 1 or len(both) > 1:
            raise self._no("its layers do not all treat their residual alike")
        if apart == {True}:
            return "apart"
        return "sum" if both == {True} else "plain"

    def _check_visit(self, visit: _Visit, stream: Stream) -> None:
        layer, consumer = f"layer {visit.index}", visit.consumer
        kind = type(consumer.module).__name__
        given = set(consumer.given)
        is_sum = len(consumer.given) > 1 and stream != "plain"
        if consumer.module is None or not visit.owed[stream] <= given:
            raise self._no(f"{layer} does not hand its state to the first module in it ({kind})")
        if len(given - visit.owed[stream]) != (1 if stream == "apart" and visit.index > 0 else 0):
            raise self._no(f"{layer} hands {kind} states that it was not given itself")
        if not consumer.is_norm:
            # Attention on the bare state: what is stored is what it is given, and there is nothing
            # to be added up.
            if is_sum:
                raise self._no(f"{layer} adds its residual within {kind}")
            return
        state = visit.stream(stream)
        if not consumer.output:
            raise self._no(f"{layer}'s {kind} returns no state")
        if not _close(_apply(consumer.module, state), consumer.output[0]):
            raise self._no(f"{layer}'s {kind} is not of the state that would be stored")
        if is_sum:
            sums = consumer.output[1:]
            if len(sums) != 1 or not _close(state, sums[0]):
                raise self._no(f"{layer} does not go on with the state that would be stored")

    def _check_end(self, stream: Stream, result: torch.Tensor) -> None:
        norm = self._parts.final_norm()
        kind = type(norm).__name__
        if len(self._norm_outputs) != 1 or not torch.equal(self._norm_outputs[0], _head(result)):
            raise self._no(f"it does not return what its final norm ({kind}) returned")
        hidden, residual = (*self._visits[-1].output, None)[:2]
        if hidden is None:
            raise self._no("its last layer returns no state")
        if stream != "apart":
            state = stream_of(stream, hidden, residual)
        elif len(self._norm_given) == 2 and any(torch.equal(hidden, g) for g in self._norm_given):
            state = total(self._norm_given)
        else:
            raise self._no(f"its final {kind} is not given what the last layer returned")
        if not _close(_apply(norm, state), _head(result)):
            raise self._no(f"its final {kind} is not of what the last layer returned")

    def _no(self, reason: str) -> ArmError:
        return ArmError(
            f"hooks on the layers of {self._kind} would not store its residual stream: {reason}"
        )


def _head(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[:_ROWS].clone()


def _apply(norm: Any, state: torch.Tensor) -> torch.Tensor:
    """The norm of `state` alone. Norms may work in place."""
    return tensors_of(norm(state.clone()))[0]


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for rounding, nearly everywhere.

    Element by element, because the states of neighbouring layers of a trained model have the same
    few large elements: by the largest one alone they would be taken for each other in bfloat16.
    """
    if got.shape != wanted.shape:
        return False
    tolerance = max(1e-5, 4 * torch.finfo(wanted.dtype).eps)
    got, wanted = got.float(), wanted.float()
    allowed = tolerance * (wanted.abs() + wanted.abs().median())
    return bool(((got - wanted).abs() <= allowed).float().mean() >= _MOST)

"""Capturing by hooks: on models whose residual stream is made in every way the engine has, and on
models that look like them and are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server_patch.capture import Capture, install
from server_patch.capture_audit import PointsAudit, Proof
from server_patch.capture_points import ArmError, arm, find_parts
from server_patch.layer_hooks import LayerHooks, Proven
from server_patch.layer_trace import _close

H, NUM_LAYERS, ROWS = 8, 5, 6
BOUNDARIES = (0, 1, 4)


class FusedNorm(torch.nn.Module):
    """As the engine's: with a residual it adds in place, and returns the sum beside the norm."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x / x.pow(2).mean(-1, keepdim=True).sqrt()
        residual.add_(x)
        return residual / residual.pow(2).mean(-1, keepdim=True).sqrt(), residual


class IgnoringNorm(FusedNorm):
    """As Cohere's: takes a residual and hands it through."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return super().forward(x), residual


class Block(torch.nn.Module):
    """Attention or MLP: anything that changes every row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(H, H, generator=generator) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Layer(torch.nn.Module):
    """The parts of a layer; what it does with them, and takes for that, its kind says."""

    norm_class: type[torch.nn.Module] = FusedNorm

    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_layernorm = self.norm_class()
        self.attention = Block(index)
        self.mlp = Block(100 + index)

    def summed(self, hidden_states: Any, residual: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The last addition is left to the next norm."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states, residual = FusedNorm()(self.attention(hidden_states), residual)
        return self.mlp(hidden_states), residual


class SumLayer(Layer):
    """Most of the engine's: the residual is an argument and a result."""

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.summed(hidden_states, residual)


class PlainLayer(Layer):
    """The whole stream is handed on (StableLM)."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(FusedNorm()(hidden_states))


class PostNormLayer(Layer):
    """The norms come after the blocks (OLMo 2)."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        hidden_states = hidden_states + self.input_layernorm(self.attention(hidden_states))
        return hidden_states + FusedNorm()(self.mlp(hidden_states))


class StaleLayer(Layer):
    """The residual that is handed on is an old one that nobody uses (Cohere)."""

    norm_class = IgnoringNorm

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states
        normed, residual = self.input_layernorm(hidden_states, residual)
        return residual + self.attention(normed) + self.mlp(normed), residual


class ApartLayer(Layer):
    """The residual is no argument but waits in the batch (the engine's newer models)."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        kept = getattr(forward_batch, "kept", None)
        hidden_states, forward_batch.kept = self.summed(hidden_states, kept)
        return hidden_states


class Inner(torch.nn.Module):
    """A layer stack; `true_streams` computes apart what enters each layer."""

    layer_class: type[Layer] = SumLayer
    norm_class: type[torch.nn.Module] = FusedNorm

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(self.layer_class(i) for i in range(NUM_LAYERS))
        self.norm = self.norm_class()
        self.takes_residual = "residual" in self.layer_class.forward.__annotations__

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        generator = torch.Generator().manual_seed(len(input_ids))
        hidden, residual = torch.randn(len(input_ids), H, generator=generator), None
        for layer in self.layers:
            hidden, residual = self.step(layer, hidden, residual, forward_batch)
        return self.end(hidden, residual)

    def step(self, layer: Any, hidden: Any, residual: Any, batch: Any) -> Any:
        if self.takes_residual:
            return layer(None, hidden, batch, residual)
        return layer(positions=None, hidden_states=hidden, forward_batch=batch), None

    def end(self, hidden: Any, residual: Any) -> Any:
        out = self.norm(hidden) if residual is None else self.norm(hidden, residual)
        return out[0] if isinstance(out, tuple) else out


class ApartInner(Inner):
    layer_class = ApartLayer

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        self.batch = forward_batch
        forward_batch.kept = None
        return super().forward(input_ids, positions, forward_batch)

    def end(self, hidden: Any, residual: Any) -> Any:
        return super().end(hidden, self.batch.kept)


class StaleInner(Inner):
    layer_class, norm_class = StaleLayer, IgnoringNorm


class PlainInner(Inner):
    layer_class = PlainLayer


class PostNormInner(Inner):
    layer_class = PostNormLayer


def make_batch(mode: str = "EXTEND", rids: tuple[str, ...] = ("warm-up",)) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=list(rids),
        extend_seq_lens_cpu=[ROWS],
        extend_prefix_lens_cpu=[0],
        input_ids=torch.arange(ROWS),
    )


def run(inner: Any, batch: Any) -> torch.Tensor:
    with torch.inference_mode():
        result = inner(batch.input_ids, None, forward_batch=batch)
    assert isinstance(result, torch.Tensor)
    return result


class Court:
    """A model, watched."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.parts = find_parts(SimpleNamespace(model=inner), num_layers=NUM_LAYERS)
        self.proven: list[Proven] = []
        self.refused: list[str] = []
        proof = Proof(
            self.parts, proven=self.proven.append, refused=lambda e: self.refused.append(str(e))
        )
        self.uninstall = install(inner, proof.run)


def true_streams(kind: type[Inner]) -> list[torch.Tensor]:
    """h[0] .. h[n], by the models' definitions written out."""
    layers = kind().layers
    h = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(ROWS))
    norm = FusedNorm()
    streams = [h]
    for layer in layers:
        if kind is PostNormInner:
            h = h + norm(layer.attention(h))
            h = h + norm(layer.mlp(h))
        elif kind is StaleInner:
            h = h + layer.attention(norm(h)) + layer.mlp(norm(h))
        else:
            h = h + layer.attention(norm(h))
            h = h + layer.mlp(norm(h))
        streams.append(h)
    return streams


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (Inner, "sum"),
        (PlainInner, "plain"),
        (PostNormInner, "plain"),
        (StaleInner, "plain"),
        (ApartInner, "apart"),
    ],
)
def test_a_proven_model_is_captured_right(kind: type[Inner], stream: str) -> None:
    court = Court(kind())
    plain = run(kind(), make_batch())
    assert torch.equal(run(court.inner, make_batch()), plain)
    assert court.refused == []
    (found,) = court.proven
    assert found.stream == stream
    court.uninstall()

    points = LayerHooks(court.parts, BOUNDARIES, found)
    capture = Capture(points=points, rid_prefix="xtr-", shares_forward=False)
    taken: list[Any] = []
    tap: Any = SimpleNamespace(take=lambda batch, states: taken.append(states))
    capture.connect(tap, points.probe())
    install(court.inner, capture.run)
    for batch in (make_batch("DECODE", ("xtr-a",)), make_batch(), make_batch(rids=("xtr-a",))):
        assert torch.equal(run(court.inner, batch), plain)
    (states,) = taken
    truth = true_streams(kind)
    for boundary, state in zip(BOUNDARIES, states.aux, strict=True):
        assert torch.allclose(state, truth[boundary], atol=1e-6)
    assert torch.allclose(states.last_pre, truth[-1], atol=1e-6)
    assert torch.equal(states.last, plain)
    # Off, nothing is left but the probe of the final norm where that shows h[n].
    hooked = [m for m in court.inner.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert hooked == ([court.inner.norm] if stream == "apart" else [])


def test_only_a_prefill_of_a_request_is_watched() -> None:
    court = Court(Inner())
    for batch in (make_batch("DECODE"), make_batch("IDLE"), make_batch(rids=())):
        run(court.inner, batch)
    assert (court.proven, court.refused) == ([], [])
    for _ in range(2):
        run(court.inner, make_batch())
    assert len(court.proven) == 1


# ---- models that look right --------------------------------------------------------------------


class ScalesBetween(Inner):
    def step(self, layer: Any, hidden: Any, residual: Any, batch: Any) -> Any:
        hidden, residual = super().step(layer, hidden, residual, batch)
        return hidden * 2, residual


class RunsTwice(PlainInner):
    def step(self, layer: Any, hidden: Any, residual: Any, batch: Any) -> Any:
        hidden, _ = super().step(layer, hidden, residual, batch)
        return super().step(layer, hidden, residual, batch)


class ForgetsWhatIsApart(ApartInner):
    def end(self, hidden: Any, residual: Any) -> Any:
        return Inner.end(self, hidden, None)


class SwapsWhatIsApart(ApartInner):
    def end(self, hidden: Any, residual: Any) -> Any:
        return super().end(hidden * 2, residual)


class FusesTheNorm(Inner):
    """An all-reduce and the norm in one kernel, past the module."""

    class Layer(SumLayer):
        def forward(
            self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any
        ) -> Any:
            if residual is None:
                return self.summed(hidden_states, None)
            hidden_states, residual = FusedNorm()(hidden_states * 2, residual)
            return self.mlp(self.attention(hidden_states)), residual

    layer_class = Layer


class NormsAPart(Inner):
    """Takes the sum for its norm and goes on with something else."""

    class Norm(FusedNorm):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is None:
                return super().forward(x)
            return super().forward(x + residual), residual + 2 * x

    class Layer(SumLayer):
        pass

    layer_class = Layer


NormsAPart.Layer.norm_class = NormsAPart.Norm


class ScalesAtTheEnd(Inner):
    def end(self, hidden: Any, residual: Any) -> Any:
        return super().end(hidden, residual) * 3


class Spread(PlainInner):
    """Each rank has some of the rows (DP attention)."""

    def end(self, hidden: Any, residual: Any) -> Any:
        return torch.cat([super().end(hidden, residual)] * 2)


class ManyStreams(PlainInner):
    """Hyper-connections."""

    def step(self, layer: Any, hidden: Any, residual: Any, batch: Any) -> Any:
        return super().step(layer, hidden.unsqueeze(1), residual, batch)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ScalesBetween, "layer 1 is not entered with what layer 0 returned"),
        (RunsTwice, r"not run once each, in order, but as \[0, 0, 1, 1"),
        (ForgetsWhatIsApart, "its final FusedNorm is not given what the last layer returned"),
        (SwapsWhatIsApart, "its final FusedNorm is not given what the last layer returned"),
        (FusesTheNorm, "layer 1 does not hand its state to the first module in it"),
        (NormsAPart, "layer 1 does not go on with the state that would be stored"),
        (ScalesAtTheEnd, "does not return what its final norm"),
        (Spread, "layer 0 sees 6 rows of 12"),
        (ManyStreams, r"entered with \[6, 1, 8\]"),
    ],
)
def test_a_model_that_only_looks_right_is_refused(kind: type[Inner], reason: str) -> None:
    court = Court(kind())
    plain = run(kind(), make_batch())
    assert torch.equal(run(court.inner, make_batch()), plain)
    assert court.proven == []
    (message,) = court.refused
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(message)
    hooked = [m for m in court.inner.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert hooked == []


def test_a_layer_with_parameters_of_unknown_meaning_is_not_even_watched() -> None:
    class OddLayer(Layer):
        def forward(
            self, positions: Any, hidden_states: Any, forward_batch: Any, per_layer_input: Any
        ) -> Any: ...

    class Odd(PlainInner):
        layer_class = OddLayer

    with pytest.raises(ArmError, match="takes per_layer_input: its state may be there too"):
        Court(Odd())


def proven_hooks() -> tuple[Court, LayerHooks]:
    """Hooks as they were proven on a forward, and the model that it was."""
    court = Court(Inner())
    run(court.inner, make_batch())
    (found,) = court.proven
    court.uninstall()
    points = LayerHooks(court.parts, (1, 3), found)
    return court, points


def test_a_forward_that_runs_otherwise_than_the_proven_one_gives_nothing() -> None:
    """Kernels may be chosen by the number of rows."""
    court, points = proven_hooks()
    layer = court.inner.layers[3]
    layer.forward = lambda positions, hidden, batch, residual: FusesTheNorm.Layer.forward(
        layer, positions, hidden, batch, residual
    )
    with points.active():
        result = run(court.inner, make_batch())
    assert points.split(result) == (result, None)


def test_a_last_layer_whose_states_cannot_be_added_up_harms_nobody() -> None:
    """The sum takes device memory, and there may be none left."""
    court, points = proven_hooks()
    probe = points.probe()

    class NoMemory(torch.Tensor):
        def __add__(self, other: object) -> Any:
            raise torch.OutOfMemoryError("injected")

    probe.listen()
    last = court.inner.layers[-1]
    state = torch.ones(2, H)
    last.forward = lambda *_: (state.as_subclass(NoMemory), state)
    assert len(last()) == 2
    assert probe.take() is None


# ---- the engine's own capture points, audited --------------------------------------------------


class Engine(Inner):
    """Has capture points; `offset` puts what they hold off by so many layers."""

    offset = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        self.aux: list[torch.Tensor] = []
        hidden = super().forward(input_ids, positions, forward_batch)
        return (hidden, self.aux) if self.aux else hidden

    def step(self, layer: Any, hidden: Any, residual: Any, batch: Any) -> Any:
        index = list(self.layers).index(layer)
        if index + self.offset in self.layers_to_capture:
            self.aux.append(self.captured(hidden, residual))
        return super().step(layer, hidden, residual, batch)

    def captured(self, hidden: Any, residual: Any) -> torch.Tensor:
        return hidden.clone() if residual is None else hidden + residual


class LateEngine(Engine):
    offset = -1


class HalfEngine(Engine):
    """Gemma 3's: the residual came later, and the capture was left as it was."""

    def captured(self, hidden: Any, residual: Any) -> torch.Tensor:
        return hidden.clone()


class HalfEngineThatHooksGetWrong(HalfEngine):
    def end(self, hidden: Any, residual: Any) -> Any:
        return super().end(hidden, residual) * 3


class Fused(Engine):
    layer_class = FusesTheNorm.Layer


def audit(
    kind: type[Engine], *, must_prove: bool = False, boundaries: tuple[int, ...] = (1, 3)
) -> tuple[list[Any], list[Any], list[str]]:
    """(calls of `right` and `wrong`, states taken, refusals) of a warm-up and a request of ours."""
    inner = kind()
    parts = find_parts(SimpleNamespace(model=inner), num_layers=NUM_LAYERS)
    points = arm(parts, boundaries)
    decided: list[Any] = []
    capture = Capture(
        points=points,
        rid_prefix="xtr-",
        shares_forward=False,
        audit=PointsAudit(
            parts,
            must_prove=must_prove,
            right=lambda: decided.append("right"),
            wrong=lambda fault, found: decided.append((fault, found)),
        ),
    )
    taken: list[Any] = []
    refused: list[str] = []
    tap: Any = SimpleNamespace(
        take=lambda batch, states: taken.append(states),
        refuse=lambda rids, reason: refused.append(reason),
    )
    capture.connect(tap, None)
    install(inner, capture.run)
    plain = run(kind(), make_batch())
    for batch in (make_batch("DECODE"), make_batch(), make_batch(rids=("xtr-a",))):
        assert torch.equal(run(inner, batch), plain)
        assert inner.layers_to_capture == []
    return decided, taken, refused


def test_right_points_are_proven_on_the_warm_up() -> None:
    decided, taken, _ = audit(Engine, must_prove=True)
    assert decided == ["right"]
    (states,) = taken
    truth = true_streams(Inner)
    for boundary, state in zip((1, 3), states.aux, strict=True):
        assert torch.allclose(state, truth[boundary], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "hooks_would_do"),
    [(LateEngine, True), (HalfEngine, True), (HalfEngineThatHooksGetWrong, False)],
)
def test_wrong_points_are_found_out(kind: type[Engine], hooks_would_do: bool) -> None:
    decided, _, _ = audit(kind)
    ((fault, found),) = decided
    assert "capture at boundary 1 is not the state that the layer works on" in fault
    assert (found is not None) is hooks_would_do


def test_the_states_of_neighbouring_layers_are_told_apart_in_bfloat16() -> None:
    """A trained model's: a few large elements that stay, and many small ones that change."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(ROWS, 512, generator=generator)
    state[:, :2] = 300.0
    near = state + 0.2 * torch.randn(ROWS, 512, generator=generator)
    norm = FusedNorm()
    wanted = norm(state).bfloat16()
    assert _close(norm(state.bfloat16()), wanted)
    assert not _close(norm(near.bfloat16()), wanted)
    assert not _close(torch.full_like(wanted, torch.nan), wanted)


def test_what_cannot_be_audited_is_believed_unless_it_must_be_proven() -> None:
    decided, taken, _ = audit(Fused)
    assert decided == ["right"]
    assert len(taken) == 1
    decided, _, _ = audit(Fused, must_prove=True)
    ((fault, found),) = decided
    assert (fault.partition(".")[0], found) == (
        "of the boundaries [1, 3] only [] are proven",
        None,
    )


def test_a_request_of_ours_that_is_audited_itself_gets_the_fault_and_no_dump() -> None:
    """A server without a warm-up."""
    inner = HalfEngine()
    parts = find_parts(SimpleNamespace(model=inner), num_layers=NUM_LAYERS)
    points = arm(parts, (1, 3))
    capture = Capture(
        points=points,
        rid_prefix="xtr-",
        shares_forward=False,
        audit=PointsAudit(
            parts, must_prove=False, right=lambda: None, wrong=lambda fault, found: change(found)
        ),
    )

    def change(found: Proven | None) -> None:
        assert found is not None
        capture.change(LayerHooks(parts, (1, 3), found, instead_of=points))

    taken: list[Any] = []
    refused: list[str] = []
    tap: Any = SimpleNamespace(
        take=lambda batch, states: taken.append(states),
        refuse=lambda rids, reason: refused.append(reason),
    )
    capture.connect(tap, None)
    install(inner, capture.run)
    for _ in range(2):
        run(inner, make_batch(rids=("xtr-a",)))
    (reason,) = refused
    assert "is not the state that the layer works on" in reason
    (states,) = taken
    truth = true_streams(Inner)
    for boundary, state in zip((1, 3), states.aux, strict=True):
        assert torch.allclose(state, truth[boundary], atol=1e-6)

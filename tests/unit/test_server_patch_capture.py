"""The wrapped forward: when it captures, and that it returns what the plain one returns."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server_patch import sglang_api
from server_patch.capture import Capture, install
from server_patch.capture_points import arm, find_parts
from server_patch.norm_probe import NormProbe

H, NUM_LAYERS = 4, 8
BOUNDARIES = (2, 4)


class FusedNorm(torch.nn.Module):
    """As the engine's: adds in place, and returns the sum beside the result."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x * 2
        residual.add_(x)
        return residual * 2, residual


class InPlaceNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.mul_(2)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(NUM_LAYERS))
        self.norm: torch.nn.Module = FusedNorm()
        self.layers_to_capture: list[int] = []
        self.with_residual = True

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, embeds: Any = None
    ) -> Any:
        hidden, residual = torch.ones(len(input_ids), H), torch.full((len(input_ids), H), 3.0)
        aux = [
            torch.full((len(input_ids), H), float(i))
            for i in range(NUM_LAYERS)
            if i in self.layers_to_capture
        ]
        if self.with_residual:
            hidden, _ = self.norm(hidden, residual)
        else:
            hidden = self.norm(hidden)
        return (hidden, aux) if aux else hidden


class Causal(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [value + 1 for value in ids]

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        hidden = self.model(input_ids, positions, forward_batch=forward_batch)
        assert isinstance(hidden, torch.Tensor)
        return hidden


class FakeTap:
    def __init__(self, *, broken: bool = False) -> None:
        self.taken: list[tuple[Any, Any]] = []
        self.refused: list[str] = []
        self._broken = broken

    def take(self, batch: Any, states: Any) -> None:
        if self._broken:
            raise RuntimeError("tap")
        self.taken.append((batch, states))

    def refuse(self, rids: Any, reason: str) -> None:
        self.refused.append(reason)


def make_batch(rids: list[str], mode: str = "EXTEND", **extra: Any) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=rids,
        extend_seq_lens_cpu=[2] * len(rids),
        extend_prefix_lens_cpu=[0] * len(rids),
        input_ids=torch.arange(2 * len(rids)),
        **extra,
    )


def make_model(
    tap: Any, *, shares_forward: bool = False, probe: bool = True
) -> tuple[Causal, Capture]:
    causal = Causal()
    parts = find_parts(causal, num_layers=NUM_LAYERS)
    capture = Capture(
        points=arm(parts, BOUNDARIES), rid_prefix="xtr-", shares_forward=shares_forward
    )
    install(parts.inner, capture.run)
    capture.connect(tap, NormProbe(parts.final_norm()) if probe else None)
    return causal, capture


def run(causal: Causal, batch: Any) -> torch.Tensor:
    result = causal(batch.input_ids, None, batch)
    assert isinstance(result, torch.Tensor)
    return result


def test_our_prefill_is_captured_and_its_result_is_the_plain_one() -> None:
    tap = FakeTap()
    causal, _ = make_model(tap)
    batch = make_batch(["xtr-a", "other"])
    assert torch.equal(run(causal, batch), run(Causal(), batch))
    ((seen, states),) = tap.taken
    assert seen.rids == ["xtr-a", "other"]
    assert [float(part[0, 0]) for part in states.aux] == [2.0, 4.0]
    assert torch.equal(states.last, torch.full((4, H), 8.0))
    assert torch.equal(states.last_pre, torch.full((4, H), 4.0))  # the sum, before the norm
    assert causal.model.layers_to_capture == []


@pytest.mark.parametrize(
    "batch",
    [
        make_batch(["other"]),
        make_batch(["xtr-a"], mode="DECODE"),
        make_batch(["xtr-a"], mode="TARGET_VERIFY"),
        make_batch(["xtr-a"], mode="EXTEND", _original_forward_mode="DECODE"),
        make_batch([], mode="IDLE"),
        SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"), rids=None, input_ids=torch.arange(2)
        ),
    ],
    ids=["foreign", "decode", "verify", "relabelled", "idle", "graph capture"],
)
def test_everything_else_runs_the_plain_model(batch: Any) -> None:
    tap = FakeTap()
    causal, _ = make_model(tap)
    points: list[list[int]] = []
    causal.model.norm.register_forward_hook(
        lambda *_: points.append(list(causal.model.layers_to_capture))
    )
    assert torch.equal(run(causal, batch), run(Causal(), batch))
    assert points == [[]]
    assert (tap.taken, tap.refused) == ([], [])


@pytest.mark.parametrize("rids", [["xtr-a"], ["other"]])
@pytest.mark.parametrize("extends", [True, False])
def test_ranks_that_share_a_forward_decide_alike(rids: list[str], extends: bool) -> None:
    """Under DP attention a rank must capture when another rank's requests make it capture."""
    tap = FakeTap()
    causal, _ = make_model(tap, shares_forward=True)
    points: list[list[int]] = []
    causal.model.norm.register_forward_hook(
        lambda *_: points.append(list(causal.model.layers_to_capture))
    )
    mode = "EXTEND" if extends else "DECODE"
    run(causal, make_batch(rids, mode=mode, is_extend_in_batch=extends))
    assert points == [[2, 4] if extends else []]
    assert len(tap.taken) == (1 if extends and rids == ["xtr-a"] else 0)


def test_a_rank_without_a_tap_captures_and_drops() -> None:
    causal, _ = make_model(None, probe=False)
    points: list[list[int]] = []
    causal.model.norm.register_forward_hook(
        lambda *_: points.append(list(causal.model.layers_to_capture))
    )
    run(causal, make_batch(["xtr-a"]))
    assert points == [[2, 4]]


def test_a_tap_that_raises_does_not_reach_the_engine() -> None:
    tap = FakeTap(broken=True)
    causal, _ = make_model(tap)
    batch = make_batch(["xtr-a"])
    assert torch.equal(run(causal, batch), run(Causal(), batch))
    assert tap.refused == ["the forward cannot be handed over: tap"]


def test_a_batch_that_cannot_be_told_apart_runs_the_plain_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tap = FakeTap()
    causal, _ = make_model(tap)
    batch = make_batch(["xtr-a"])
    batch.forward_mode = "EXTEND"  # a mode without a name
    for _ in range(3):
        assert torch.equal(run(causal, batch), run(Causal(), batch))
    assert (tap.taken, tap.refused) == ([], [])
    assert [record.message for record in caplog.records] == [
        "hidden states: cannot inspect a forward batch; not capturing it"
    ]


def test_a_norm_of_another_kind_shows_nothing_and_harms_nobody() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"normed": x}

    norm = Odd()
    probe = NormProbe(norm)
    probe.listen()
    assert set(norm(torch.ones(2, H))) == {"normed"}
    assert probe.take() is None


def test_a_batch_that_cannot_be_read_is_refused() -> None:
    tap = FakeTap()
    causal, _ = make_model(tap)
    batch = make_batch(["xtr-a"])
    batch.extend_seq_lens_cpu = None
    run(causal, batch)
    assert tap.refused == [
        "the forward cannot be handed over: SimpleNamespace.extend_seq_lens_cpu is None"
    ]


def test_a_forward_that_captured_nothing_is_refused() -> None:
    tap = FakeTap()
    _, capture = make_model(tap)
    assert torch.equal(
        capture.run(make_batch(["xtr-a"]), lambda: torch.ones(2, H)), torch.ones(2, H)
    )
    assert tap.refused == ["the engine captured nothing in this forward"]


def test_an_error_of_the_model_passes_and_leaves_the_points_off() -> None:
    causal, capture = make_model(FakeTap())

    def fails() -> Any:
        assert causal.model.layers_to_capture == [2, 4]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture.run(make_batch(["xtr-a"]), fails)
    assert causal.model.layers_to_capture == []


def test_without_a_residual_the_input_of_the_norm_is_taken() -> None:
    tap = FakeTap()
    causal, _ = make_model(tap)
    causal.model.with_residual = False
    run(causal, make_batch(["xtr-a"]))
    ((_, states),) = tap.taken
    assert torch.equal(states.last_pre, torch.ones(2, H))


def test_a_norm_that_overwrites_its_input_shows_nothing() -> None:
    norm = InPlaceNorm()
    probe = NormProbe(norm)
    probe.listen()
    norm(torch.ones(2, H))
    assert probe.take() is None


def test_the_probe_does_not_keep_tensors_of_other_forwards() -> None:
    norm = FusedNorm()
    probe = NormProbe(norm)
    norm(torch.ones(2, H))
    assert probe.take() is None


def test_the_forward_keeps_its_signature() -> None:
    causal, _ = make_model(FakeTap())
    assert inspect.signature(causal.model.forward) == inspect.signature(Inner().forward)


def test_a_forward_without_a_batch_is_refused() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    _, capture = make_model(FakeTap())
    with pytest.raises(sglang_api.EngineError, match="takes no forward_batch"):
        install(Odd(), capture.run)

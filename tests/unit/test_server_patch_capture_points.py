"""Arming, on models that follow each convention the engine has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server_patch.capture_points import SETTER, ArmError, arm, find_parts, read_back

NUM_LAYERS = 8


class Layer:
    pass


class Inner:
    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(NUM_LAYERS)]
        self.layers_to_capture: list[int] = []


class Llama:
    """Every id is an output of a layer."""

    def __init__(self) -> None:
        self.model: Any = Inner()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [value + 1 for value in layer_ids]


class DeepSeek(Llama):
    """Ids are boundaries, except that a first id of 1 shifts them all."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        shift = 1 if layer_ids[0] == 1 else 0
        self.model.layers_to_capture = [value + shift for value in layer_ids]


class Exact(Llama):
    """Ids are boundaries."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = list(layer_ids)


class QwenMoe(Llama):
    """Flags on the layers decide, and nothing ever clears them."""

    shift = 1

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [value + self.shift for value in layer_ids]
        for index in self.model.layers_to_capture:
            self.model.layers[index]._is_layer_to_capture = True


class QwenMoeExact(QwenMoe):
    shift = 0


class Strange(QwenMoe):
    shift = 3


class Raising(Llama):
    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        raise ValueError("not for this model")


class Wrapper:
    """A multimodal wrapper, as Kimi-K2.5's: an alias `model`, and a setter that delegates."""

    def __init__(self, language_model: Any) -> None:
        self.language_model = language_model

    @property
    def model(self) -> Any:
        return self.language_model

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(layer_ids)


CONVENTIONS = [Llama, DeepSeek, Exact, QwenMoe, QwenMoeExact]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("boundaries", [(1, 2, 3), (2, 4, 5), (3,), (0, 1, 7), (2, 3, 4)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_captured_is_what_was_asked(
    convention: type[Llama], boundaries: tuple[int, ...], wrapped: bool
) -> None:
    causal = convention()
    model = Wrapper(causal) if wrapped else causal
    parts = find_parts(model, num_layers=NUM_LAYERS)
    assert (parts.causal, parts.inner) == (causal, causal.model)
    points = arm(parts, boundaries)
    assert points.boundaries == boundaries
    # Off: as a server without the plugin, tuple flag included.
    assert read_back(causal.model) == []
    assert causal.capture_aux_hidden_states is False
    assert not hasattr(model, "capture_aux_hidden_states") or not wrapped
    with points.active():
        assert tuple(read_back(causal.model)) == boundaries
        assert tuple(causal.model.layers_to_capture) == boundaries
        assert causal.capture_aux_hidden_states is False
    assert read_back(causal.model) == []


def test_points_are_off_again_after_an_exception() -> None:
    causal = QwenMoe()
    points = arm(find_parts(causal, num_layers=NUM_LAYERS), (2, 4))
    with pytest.raises(RuntimeError), points.active():
        raise RuntimeError
    assert read_back(causal.model) == []


def test_flags_of_a_failed_try_do_not_stay() -> None:
    """Ids 1, 3 flag boundaries 1, 3 here; the second try must not add 2, 4 to them."""
    causal = QwenMoeExact()
    points = arm(find_parts(causal, num_layers=NUM_LAYERS), (2, 4))
    with points.active():
        assert read_back(causal.model) == [2, 4]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Strange(), r"boundaries \[2, 4\] not reached: ids \[1, 3\] gave \[4, 6\]"),
        (Raising(), "not for this model"),
    ],
)
def test_a_model_that_cannot_be_armed_is_left_as_it_was(model: Llama, message: str) -> None:
    with pytest.raises(ArmError, match=message):
        arm(find_parts(model, num_layers=NUM_LAYERS), (2, 4))
    assert read_back(model.model) == []
    assert model.capture_aux_hidden_states is False


def test_a_capture_that_is_already_on_is_not_ours_to_change() -> None:
    causal = Llama()
    causal.set_eagle3_layers_to_capture([1])
    with pytest.raises(ArmError, match="already on"):
        arm(find_parts(causal, num_layers=NUM_LAYERS), (2, 4))
    assert causal.model.layers_to_capture == [2]


def test_a_model_without_setter_has_parts_all_the_same() -> None:
    class Plain:
        model = Inner()

    for model in (Plain(), SimpleNamespace(language_model=Plain())):
        parts = find_parts(model, num_layers=NUM_LAYERS)
        assert (parts.architecture, parts.inner) == ("Plain", Plain.model)
        assert parts.method == "layers_to_capture"
    assert find_parts(Llama(), num_layers=NUM_LAYERS).method == SETTER


def test_an_inner_model_of_another_depth_is_not_taken() -> None:
    with pytest.raises(ArmError, match="no inner model with 9 layers"):
        find_parts(Llama(), num_layers=9)


def test_a_model_without_final_norm_is_refused() -> None:
    parts = find_parts(Llama(), num_layers=NUM_LAYERS)
    with pytest.raises(ArmError, match="final norm"):
        parts.final_norm()
    parts.inner.norm = object()
    assert parts.final_norm() is parts.inner.norm

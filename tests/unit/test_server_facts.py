"""The facts of a server that are bound, and those that may change."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import make_identity, make_ready

from extractor.servers.server_facts import (
    BOUND,
    BOUND_SETTINGS,
    RESOLVED_SETTINGS,
    differences,
    facts_of,
    facts_of_identity,
    was_updated,
)
from server_patch.sglang_compat import NUMERIC_SETTINGS

SETTINGS = {name: "before" for name in BOUND_SETTINGS | RESOLVED_SETTINGS} | {
    "attention_backend": "triton",
    "transformers": "5",
}


def facts(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"weights": "aa", "weights_layout": "l", "settings": SETTINGS}
    return facts_of(make_ready(**{**values, **changes}))


def names(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [difference.name for difference in differences(before, now)]


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_field_that_changes_is_named_with_both_values(name: str) -> None:
    (difference,) = differences(facts(), facts(**{name: "other"}))
    assert difference.name == name
    assert difference.now == "other"
    text = difference.to_text(before="was", now="is")
    assert text.startswith(f"  {name}: was ") and text.endswith(", is other")


@pytest.mark.parametrize("name", sorted(BOUND_SETTINGS | RESOLVED_SETTINGS))
def test_a_bound_setting_that_changes_appears_or_disappears_is_named(name: str) -> None:
    without = {key: value for key, value in SETTINGS.items() if key != name}
    assert names(facts(), facts(settings=SETTINGS | {name: "after"})) == [name]
    assert names(facts(), facts(settings=without)) == [name]
    assert names(facts(settings=without), facts()) == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_version", "9"), ("plugin_version", "9"), ("tp_size", 8), ("dp_size", 2),
        ("weight_version", "v2"), ("chunked_prefill_size", 64), ("model_path", "/moved"),
        ("settings", SETTINGS | {"attention_backend": "fa3"}),
    ],
)  # fmt: skip
def test_facts_that_change_only_rounding_are_not_differences(name: str, value: object) -> None:
    now = facts(**{name: value})
    assert names(facts(), now) == []
    assert now[name] == value


@pytest.mark.parametrize("name", sorted(RESOLVED_SETTINGS))
def test_defaults_of_libraries_are_compared_between_equal_versions_only(name: str) -> None:
    changed = SETTINGS | {name: "after"}
    assert names(facts(), facts(settings=changed)) == [name]
    assert names(facts(), facts(settings=changed | {"transformers": "6"})) == []
    assert names(facts(), facts(settings=changed, engine_version="9")) == []


def test_every_bound_setting_is_one_that_the_plugin_announces() -> None:
    announced = {target.places[0].rpartition(".")[2] for target in NUMERIC_SETTINGS}
    assert announced >= BOUND_SETTINGS - {"context_length"}


def test_other_weights_are_a_difference_if_the_fingerprints_are_comparable() -> None:
    assert names(facts(), facts(weights="bb")) == ["weights"]
    assert names(facts(), facts(weights="aa+1f")) == ["weights"]
    # Fingerprints of other slices are not comparable: the canary decides.
    assert names(facts(), facts(weights="bb", weights_layout="m")) == []
    # Without an earlier fingerprint, a difference cannot be detected.
    assert names(facts(weights=None), facts()) == []
    assert names(facts(), facts(weights=None)) == ["weights"]


def test_an_update_in_place_shows_in_the_id() -> None:
    assert was_updated(make_ready(weights="aa+1f"))
    assert not was_updated(make_ready(weights="aa"))
    assert not was_updated(make_ready(weights=None))


def test_missing_settings_of_an_older_plugin_are_not_a_difference() -> None:
    assert facts(settings={})["settings"] is None
    assert names(facts(settings={}), facts()) == []
    assert names(facts(weights=None), facts(weights=None, settings={})) == []


def test_a_data_set_without_recorded_starts_is_compared_by_its_identity() -> None:
    begun = facts_of_identity(make_identity(config_digest="fake", quantization=None))
    assert names(begun, facts()) == []
    assert names(begun, facts(config_digest="x", quantization="fp8", kv_cache_dtype="fp8")) == [
        "config_digest", "quantization",
    ]  # fmt: skip

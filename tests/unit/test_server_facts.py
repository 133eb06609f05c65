"""The facts of a server that are bound, and those that may change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_identity, make_ready

from extractor.core.errors import ConfigMismatch
from extractor.core.identity import Identity
from extractor.dumps.dump_reader import Rank
from extractor.servers.client import ServerFacts
from extractor.servers.server_facts import (
    BOUND,
    BOUND_SETTINGS,
    RESOLVED_SETTINGS,
    differences,
    facts_of,
    facts_of_identity,
    was_updated,
)
from extractor.servers.target import Target, check_compatible
from extractor.shards.dataset import dataset_document
from server_patch.directory import Directory
from server_patch.dump_format import MODEL_KEYS, Ready, decode_ready, encode_ready
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


def another(name: str) -> Any:
    """A value of that key of READY.json which is not the usual one."""
    usual = make_ready().to_document()[name]
    return "F32" if name == "dtype" else usual + 1 if isinstance(usual, int) else "other"


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_field_that_changes_is_named_with_both_values(name: str) -> None:
    (difference,) = differences(facts(), facts(**{name: another(name)}))
    assert difference.name == name
    assert difference.now == another(name)
    text = difference.to_text()
    assert text.startswith(f"  {name}: was ") and text.endswith(f", is {another(name)}")


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_every_fact_about_the_model_is_compared_recorded_and_kept(key: str) -> None:
    """Of `ModelInfo` itself, so that a new field needs no further edit."""
    ready = make_ready(**{key: another(key)})
    assert decode_ready(encode_ready(ready)).model == ready.model != make_ready().model
    one, other = (target_of(ready, number) for number, ready in enumerate((make_ready(), ready)))
    with pytest.raises(ConfigMismatch, match=rf"  {key}: "):
        check_compatible(one, other)
    assert facts_of(ready)[key] == another(key)
    begun = make_identity()
    changed = replace(begun, model=ready.model)
    document = json.loads(json.dumps(changed.to_document()))
    assert document["model" if key == "model_path" else key] == another(key)
    assert Identity.from_document(document) == changed
    assert json.loads(dataset_document(changed, []))["model" if key == "model_path" else key]


def target_of(ready: Ready, number: int) -> Target:
    facts = ServerFacts(
        model_path="m", tokenizer_path="m", context_length=100, max_input_tokens=None,
        max_requests=None, version="v",
    )  # fmt: skip
    rank = Rank(directory=Directory(-1, Path("d")), ready=replace(ready, boot_id=f"boot-{number}"))
    return Target.of(f"http://server-{number}", facts, (rank,))


def test_a_fact_that_an_older_version_did_not_keep_is_its_default() -> None:
    document = make_identity().to_document()
    del document["quantization"]
    assert Identity.from_document(json.loads(json.dumps(document))) == make_identity()


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

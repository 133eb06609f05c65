"""Bounds are checked where values are made, and a changed configuration is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import make_identity, run_options

from extractor.core.errors import ConfigMismatch, UsageError
from extractor.core.identity import Identity
from extractor.core.row_policy import Policy
from extractor.pipeline.resume import difference_of
from manifest.records import Source
from prompts.inputs import InputFile

OTHER: dict[str, Any] = {
    "architecture": "Other",
    "config_digest": "other",
    "vocab_size": 7,
    "num_layers": 7,
    "hidden_size": 7,
    "dtype": "F32",
    "boundaries": (0,),
    "last_kind": "both",
    "quantization": "fp8",
    "tokenizer_digest": "other",
    "template_digest": "other",
    "reading": {"thinking": "drop"},
    "inputs": ("other",),
}


def test_a_manifest_cut_off_before_it_began_says_so() -> None:
    with pytest.raises(UsageError, match="no run has got as far"):
        Identity.from_document({})


def test_every_field_of_the_identity_has_a_case_here() -> None:
    assert set(make_identity().to_document()) == set(OTHER) | {"model"}


#: Compared for each server start: see tests/unit/test_server_facts.py.
OF_THE_SERVER = {"architecture", "config_digest", "quantization"}


@pytest.mark.parametrize("field", sorted(OF_THE_SERVER))
def test_server_fields_are_left_to_provenance(field: str) -> None:
    changed = make_identity(**{field: OTHER[field]})
    changed.require_same(make_identity(), out=Path("out"))


@pytest.mark.parametrize("field", sorted(set(OTHER) - OF_THE_SERVER))
def test_a_field_that_differs_is_named_with_both_values(field: str) -> None:
    identity = make_identity()
    identity.require_same(identity, out=Path("out"))
    changed = make_identity(**{field: OTHER[field]})
    with pytest.raises(ConfigMismatch) as caught:
        changed.require_same(identity, out=Path("out"))
    lines = str(caught.value).splitlines()
    name, before, now = field, identity.to_document()[field], OTHER[field]
    if field == "reading":
        name, before, now = "--thinking", before["thinking"], now["thinking"]
    before_shown = "no value" if before is None else repr(before)
    assert lines[1] == f"  {name}: out has {before_shown}, this run has {now!r}"
    assert len(lines) == 3
    assert "another --out" in lines[2]


def test_the_option_of_the_column_is_named_as_it_is_written() -> None:
    changed = make_identity(reading={"fields": ["a"]})
    with pytest.raises(ConfigMismatch, match=r"\n  --field: out has \[\], this run has \['a'\]"):
        changed.require_same(make_identity(reading={"fields": []}), out=Path("out"))


def test_inputs_that_differ_are_told_by_name_and_not_by_digest() -> None:
    def difference(*files: tuple[str, str]) -> str:
        before = [
            Source(number=number, path=name, size_bytes=1, digest=name, num_rows=1)
            for number, name in enumerate(("a", "b"))
        ]
        now = [
            InputFile(path=path, size_bytes=1, digest=digest, num_rows=1, block_digests=b"")
            for path, digest in files
        ]
        return difference_of(before, now)

    assert difference(("b", "b"), ("a", "a")) == (
        "the same files in another order: begun with a, b, now b, a"
    )
    assert difference(("a", "a"), ("b", "x")) == "the content of b is not what it was"
    assert difference(("a", "a")) == "other files: begun with a, b, now a"
    assert difference(*((str(n), str(n)) for n in range(9))).endswith("0, 1, 2, 3 and 5 more")
    with pytest.raises(ConfigMismatch) as caught:
        make_identity(inputs=("y",)).require_same(
            make_identity(), out=Path("out"), other_inputs="another order"
        )
    assert str(caught.value).splitlines()[1:-1] == ["  inputs: another order"]


def test_all_differences_are_named_at_once_and_long_ones_are_cut() -> None:
    changed = make_identity(dtype="F32", inputs=("x" * 32,) * 100)
    with pytest.raises(ConfigMismatch) as caught:
        changed.require_same(make_identity(), out=Path("out"))
    assert len(str(caught.value).splitlines()) == 4
    assert max(map(len, str(caught.value).splitlines())) < 300


def test_an_option_that_was_not_given_is_told_in_words() -> None:
    with pytest.raises(ConfigMismatch) as caught:
        make_identity(reading={"max_tokens": 100}).require_same(
            make_identity(reading={"max_tokens": None}), out=Path("out")
        )
    assert str(caught.value).splitlines()[1] == "  --max-tokens: out has no value, this run has 100"


def test_a_manifest_from_before_an_option_has_its_default() -> None:
    now = run_options().input.document
    before = {name: value for name, value in now.items() if name not in ("tools", "min_trained")}
    make_identity(reading=now).require_same(make_identity(reading=before), out=Path("out"))
    asked = make_identity(reading={**now, "tools": "drop", "ignore_column": ["weight"]})
    with pytest.raises(ConfigMismatch) as caught:
        asked.require_same(make_identity(reading=before), out=Path("out"))
    assert str(caught.value).splitlines()[1:3] == [
        "  --tools: out has 'keep', this run has 'drop'",
        "  --ignore-column: out has [], this run has ['weight']",
    ]


def test_a_model_that_was_moved_is_the_same_model() -> None:
    make_identity(model="/elsewhere").require_same(make_identity(), out=Path("out"))


def test_an_identity_survives_the_manifest() -> None:
    identity = make_identity()
    document = json.loads(json.dumps(identity.to_document() | {"run_id": "r"}))
    assert Identity.from_document(document) == identity


def test_an_identity_of_another_version_is_refused_by_field() -> None:
    document = make_identity().to_document()
    del document["dtype"]
    with pytest.raises(ConfigMismatch, match=r"lacks the field\(s\) dtype"):
        Identity.from_document(document)


@pytest.mark.parametrize(
    ("field", "option", "value"),
    [
        ("concurrency", "--concurrency", 0), ("shard_bytes", "--shard-size", 0),
        ("num_movers", "--movers", 0), ("max_attempts", "--max-attempts", 0),
        ("request_timeout_s", "--request-timeout", 0), ("dump_timeout_s", "--dump-timeout", -1),
        ("server_wait_s", "--server-wait", -0.1), ("shm_budget_bytes", "--shm-budget", 0),
    ],
)  # fmt: skip
def test_an_option_out_of_bounds_is_named(field: str, option: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"{option} must be >= .*, is {value}"):
        run_options(**{field: value})


@pytest.mark.parametrize(
    ("field", "option", "value"),
    [
        ("concurrency", "--concurrency", 10**20), ("shard_bytes", "--shard-size", 10**20),
        ("num_movers", "--movers", 65), ("max_attempts", "--max-attempts", 10**20),
        ("request_timeout_s", "--request-timeout", math.inf),
        ("dump_timeout_s", "--dump-timeout", 1e9), ("server_wait_s", "--server-wait", math.inf),
        ("shm_budget_bytes", "--shm-budget", 10**20),
        ("tokenizer_workers", "--tokenizer-workers", 257),
    ],
)  # fmt: skip
def test_an_absurdly_large_option_is_named(field: str, option: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"{option} must be <= \d+, is"):
        run_options(**{field: value})


@pytest.mark.parametrize("field", ["request_timeout_s", "dump_timeout_s", "server_wait_s"])
def test_not_a_number_is_no_time(field: str) -> None:
    option = f"--{field.removesuffix('_s').replace('_', '-')}"
    with pytest.raises(UsageError, match=rf"{option} must be >= .*, is nan"):
        run_options(**{field: math.nan})


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "min_trained"])
def test_a_number_of_tokens_has_a_bound(field: str) -> None:
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"{option} must be <= 2147483647, is 2147483648"):
        Policy(**{field: 2**31})  # type: ignore[arg-type]


@pytest.mark.parametrize("out", ["dumps", "dumps/out", "dumps/../dumps/a/b"])
def test_a_data_set_in_the_dump_directory_is_refused(tmp_path: Path, out: str) -> None:
    with pytest.raises(UsageError, match="is inside the dump directory"):
        run_options(out=tmp_path / out, dump_root=tmp_path / "dumps")
    run_options(out=tmp_path / "dumps-out", dump_root=tmp_path / "dumps")


def test_a_run_needs_prompts() -> None:
    with pytest.raises(UsageError, match="prompt file"):
        run_options(prompts=())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "host", "http://", "http://h:99999", "ftp://h"]
)
def test_an_address_that_is_none_is_refused_with_how_to_write_it(url: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        run_options(server_urls=(url,))

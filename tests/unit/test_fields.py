"""Fields of another program's JSON are typed, or an error names the field and the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server_patch.fields import FieldError, array, integer, mapping, object_of, optional, text


def problem(read: Callable[[], object]) -> str:
    with pytest.raises(FieldError) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0), (7, 7), (10, 10),
        (-1, "a.b is -1, must be 0 or more"),
        (11, "a.b is 11, must be 10 or less"),
        (1 << 62, f"a.b is {1 << 62}, must be 10 or less"),
        (1.0, "a.b is 1.0, must be an integer"),
        (1e300, "a.b is 1e+300, must be an integer"),
        (True, "a.b is true, must be an integer"),
        (None, "a.b is null, must be an integer"),
        ("5", "a.b is '5', must be an integer"),
        ([5], "a.b is an array, must be an integer"),
        ({"c": 5}, "a.b is an object, must be an integer"),
    ],
)  # fmt: skip
def test_only_integers_within_the_range_are_accepted(value: object, expected: object) -> None:
    document = {"a": {"b": value}}

    def read() -> int:
        return integer(document, "a.b", minimum=0, maximum=10)

    assert (read() if isinstance(expected, int) else problem(read)) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the answer is not JSON"),
        (b"<html>", "the answer is not JSON"),
        (b"\xff\xfe", "the answer is not JSON"),
        (b'{"a": NaN}', "the answer is not JSON"),
        (b"[" * 100_000, "the answer is not JSON"),
        (b"[{}]", "the answer is an array, must be an object"),
        (b'"x"', "the answer is 'x', must be an object"),
        (b"null", "the answer is null, must be an object"),
    ],
)
def test_a_value_that_is_not_an_object_is_named(data: bytes, expected: str) -> None:
    assert problem(lambda: object_of(data)) == expected


def test_an_integer_beyond_64_bits_is_refused() -> None:
    document = object_of(b'{"a": 123456789012345678901234567890, "b": 18446744073709551615}')
    assert problem(lambda: integer(document, "a")).endswith("must be 9223372036854775807 or less")
    assert problem(lambda: integer(document, "b")).endswith("must be 9223372036854775807 or less")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "a.b is missing"),
        ({"a": None}, "a.b is missing"),
        ({"a": []}, "a.b is missing"),
        ({"a": 3}, "a is 3, must be an object"),
        ({"a": "text"}, "a is 'text', must be an object"),
        ({"a": {"b": ""}}, "a.b is '', must be a string"),
        ({"a": {"b": 3}}, "a.b is 3, must be a string"),
    ],
)
def test_the_step_that_fails_is_named(document: dict[str, Any], expected: str) -> None:
    if document.get("a") == []:
        expected = "a is an array, must be an object"
    assert problem(lambda: text(document, "a.b")) == expected


def test_a_path_can_index_arrays() -> None:
    document = {"states": [{"n": 1}, {"n": "x"}, 4]}
    assert len(array(document, "states")) == 3
    assert integer(document, "states.0.n") == 1
    assert problem(lambda: integer(document, "states.1.n")) == (
        "states.1.n is 'x', must be an integer"
    )
    assert problem(lambda: integer(document, "states.2.n")) == "states.2 is 4, must be an object"
    assert problem(lambda: integer(document, "states.3.n")) == "states.3.n is missing"
    assert problem(lambda: mapping(document, "states")) == "states is an array, must be an object"
    assert problem(lambda: array(document, "states.0")) == "states.0 is an object, must be an array"


def test_an_optional_field_may_be_missing_or_null_but_not_wrong() -> None:
    document = {"a": None, "b": 5, "c": "x"}
    assert optional(integer, document, "a") is None
    assert optional(integer, document, "z.y") is None
    assert optional(integer, document, "b", minimum=5) == 5
    assert problem(lambda: optional(integer, document, "b", minimum=6)) == (
        "b is 5, must be 6 or more"
    )
    assert problem(lambda: optional(integer, document, "c")) == "c is 'x', must be an integer"


def test_a_long_value_is_shortened() -> None:
    told = problem(lambda: integer({"a": "x" * 10_000}, "a"))
    assert len(told) < 100
    assert told.endswith("..., must be an integer")

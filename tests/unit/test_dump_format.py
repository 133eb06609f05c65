"""The dump contract: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import deserialize, make_header, make_ready, read_header
from hypothesis import given
from hypothesis import strategies as st

from server_patch.directory import Directory
from server_patch.dump_format import (
    DATA_ALIGNMENT,
    LAST_TENSORS,
    MAX_HEADER_BYTES,
    STATE_DTYPES,
    DumpFormatError,
    DumpHeader,
    ErrorRecord,
    FailedRecord,
    StateLayout,
    decode_error,
    decode_failed,
    decode_header,
    decode_ready,
    dump_name,
    encode_error,
    encode_failed,
    encode_header,
    encode_ready,
    error_name,
    is_dump_name,
    is_error_name,
    read_beginning,
)

headers = st.builds(
    DumpHeader,
    rid=st.text(min_size=1, max_size=80),
    start=st.integers(0, 10**7),
    rows=st.integers(1, 10**6),
    layout=st.builds(
        StateLayout,
        boundaries=st.sets(st.integers(0, 200), min_size=1, max_size=8).map(
            lambda found: tuple(sorted(found))
        ),
        hidden_size=st.integers(1, 20_000),
        dtype=st.sampled_from(STATE_DTYPES),
        last_kind=st.sampled_from(sorted(LAST_TENSORS)),
    ),
    boot_id=st.text(max_size=40),
    rank=st.integers(0, 1000),
    counter=st.integers(0, 10**10),
)


def data_bytes(header: DumpHeader) -> int:
    return header.rows * header.layout.bytes_per_token


@given(headers)
def test_a_header_is_read_back_as_it_was_written(header: DumpHeader) -> None:
    encoded = encode_header(header)
    assert len(encoded) % DATA_ALIGNMENT == 0
    size = len(encoded) + data_bytes(header)
    dump = decode_header(encoded, file_bytes=size)
    assert dump.header == header
    spans = list(dump.tensors.values())
    # Packed: no holes, no overlaps, from the header's end to the file's.
    assert spans[0].begin == len(encoded)
    assert spans[-1].end == size
    assert [span.end for span in spans[:-1]] == [span.begin for span in spans[1:]]
    assert list(dump.tensors) == ["aux", *LAST_TENSORS[header.layout.last_kind], "input_ids"]


@given(headers, st.data())
def test_a_file_of_any_other_size_is_refused(header: DumpHeader, data: st.DataObject) -> None:
    encoded = encode_header(header)
    size = len(encoded) + data_bytes(header)
    wrong = data.draw(st.integers(0, 2 * size).filter(lambda n: n != size))
    with pytest.raises(DumpFormatError):
        decode_header(encoded[:wrong], file_bytes=wrong)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(DumpFormatError):
        decode_header(data, file_bytes=len(data))


@given(headers, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_the_header(
    header: DumpHeader, place: int, bits: int
) -> None:
    """Whatever is accepted describes the file exactly."""
    encoded = bytearray(encode_header(header))
    encoded[place % len(encoded)] ^= bits
    size = len(encoded) + data_bytes(header)
    try:
        dump = decode_header(bytes(encoded), file_bytes=size)
    except DumpFormatError:
        return
    assert list(dump.tensors.values())[-1].end == size
    assert data_bytes(dump.header) == data_bytes(header)


def test_the_safetensors_library_reads_a_dump(tmp_path: Path) -> None:
    header = make_header()
    path = tmp_path / dump_name(7)
    path.write_bytes(encode_header(header) + bytes(range(204)))
    assert data_bytes(header) == 204
    content = dict(deserialize(path.read_bytes()))
    assert {name: entry["shape"] for name, entry in content.items()} == {
        "aux": [3, 24], "last": [3, 8], "input_ids": [3],
    }  # fmt: skip
    assert bytes(content["input_ids"]["data"]) == bytes(range(192, 204))
    assert read_header(path).header == header


# --- hostile headers --------------------------------------------------------------------------


def good_document() -> dict[str, Any]:
    encoded = encode_header(make_header())
    (length,) = struct.unpack_from("<Q", encoded)
    document: dict[str, Any] = json.loads(encoded[8 : 8 + length])
    return document


def with_metadata(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["__metadata__"].update(changes)


def with_tensor(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.setdefault(name, {}).update(changes)


@pytest.mark.parametrize(
    "change",
    [
        with_tensor("aux", data_offsets=[0, 145]),
        with_tensor("last", data_offsets=[0, 48]),  # overlaps aux
        with_tensor("last", data_offsets=[144, 191]),
        with_tensor("input_ids", data_offsets=[192, 10**18]),  # far outside the file
        with_tensor("input_ids", data_offsets=[-12, 0]),
        with_tensor("aux", shape=[3, 25]),
        with_tensor("aux", shape=[24, 3]),
        with_tensor("aux", shape=[2**62, 2**62]),
        with_tensor("aux", dtype="F16"),
        with_tensor("aux", extra=1),
        with_tensor("more", dtype="U8", shape=[0], data_offsets=[204, 204]),
        lambda document: document.pop("last"),
        lambda document: document.pop("__metadata__"),
        lambda document: document.update({"__metadata__": "text"}),
        lambda document: document.update({"aux": None}),
        with_metadata(format_version="2"),
        with_metadata(rid=""),
        with_metadata(start="-1"),
        with_metadata(start="NaN"),
        with_metadata(rows="0"),
        with_metadata(rows="4"),
        with_metadata(rows="999999999999999999999999"),
        with_metadata(rows="1e3"),
        with_metadata(hidden_size="0"),
        with_metadata(boundaries=""),
        with_metadata(boundaries="3,2,1"),
        with_metadata(boundaries="1,1,2"),
        with_metadata(boundaries=[1, 2, 3]),
        with_metadata(dtype="F64"),
        with_metadata(last_kind="none"),
        with_metadata(rank="-1"),
        with_metadata(counter="-7"),
    ],
)
def test_a_header_that_lies_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    document = good_document()
    change(document)
    text = json.dumps(document).encode()
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(DumpFormatError):
        decode_header(data, file_bytes=len(data) + 204)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100_000_000) + b"{}",
        struct.pack("<Q", MAX_HEADER_BYTES) + b"{}",
        struct.pack("<Q", 50) + b'{"__metadata__"',
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 60_000) + b"[" * 60_000,
        struct.pack("<Q", 60_000) + b'{"a":' * 12_000,
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 3) + b"NaN",
        struct.pack("<Q", 9) + b'{"a": 1}\x00',
        struct.pack("<Q", 5000) + b"9" * 5000,
    ],
    ids=range(16),
)
def test_bytes_that_are_no_header_are_refused_quickly(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DumpFormatError):
        decode_header(data, file_bytes=len(data))
    path = tmp_path / dump_name(1)
    path.write_bytes(data)
    with pytest.raises(DumpFormatError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize("more_bytes", [-1, 0, 1])
def test_a_file_is_read_whole_up_to_a_size_and_only_its_beginning_beyond(
    more_bytes: int, tmp_path: Path
) -> None:
    header = make_header(hidden_size=1024)
    content = encode_header(header)
    content += bytes(data_bytes(header))
    assert len(content) > 4096
    path = tmp_path / dump_name(1)
    path.write_bytes(content)
    with Directory.open(tmp_path) as directory:
        dump, beginning = read_beginning(
            directory, path.name, whole_bytes=len(content) + more_bytes
        )
    assert dump == read_header(path)
    assert beginning == (content if more_bytes >= 0 else content[:4096])


def test_a_huge_claim_does_not_make_the_reader_read_it(tmp_path: Path) -> None:
    path = tmp_path / dump_name(1)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DumpFormatError, match="claims"):
        read_header(path)


def test_a_rid_that_makes_the_header_too_long_is_not_written() -> None:
    with pytest.raises(DumpFormatError, match="exceeds"):
        encode_header(make_header(rid="r" * MAX_HEADER_BYTES))


# --- the other files --------------------------------------------------------------------------


@given(st.text(), st.integers(0, 10**9), st.text())
def test_an_error_record_is_read_back(rid: str, start: int, reason: str) -> None:
    record = ErrorRecord(rid=rid, start=start, reason=reason)
    assert decode_error(encode_error(record)) == record


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"rid": "a", "start": "b", "reason": ""}', b"[" * 100_000]
)
def test_a_broken_error_record_is_refused(data: bytes) -> None:
    with pytest.raises(DumpFormatError):
        decode_error(data)


#: As released versions of the plugin wrote them.
READY_BYTES = b"""{
 "format_version": 1,
 "boot_id": "boot",
 "rank": 0,
 "pid": 1,
 "pid_start_ticks": 1,
 "started_at": "1970-01-01T00:00:00+00:00",
 "plugin_version": "0",
 "engine_version": "0.5.11",
 "host": "127.0.0.1",
 "port": 30000,
 "model_path": "fake/model",
 "architecture": "FakeForCausalLM",
 "config_digest": "fake",
 "vocab_size": 1000,
 "num_layers": 4,
 "hidden_size": 8,
 "dtype": "BF16",
 "boundaries": [
  1,
  2,
  3
 ],
 "last_kind": "post",
 "capture_method": "fake",
 "tp_size": 1,
 "dp_size": 1,
 "rid_prefix": "xtr-",
 "chunked_prefill_size": -1,
 "radix_cache": false,
 "ring_bytes": 0,
 "num_writers": 1,
 "quantization": "fp8",
 "kv_cache_dtype": null,
 "pid_namespace": "pid:[1]",
 "weights": "w+1",
 "weights_layout": null,
 "weights_s": null,
 "weight_version": null,
 "settings": {
  "torch": "2"
 }
}"""
HEADER_TEXT = (
    b'{"__metadata__":{"format_version":"1","rid":"xtr-run-session-0-1","start":"0","rows":"3",'
    b'"boundaries":"1,2,3","hidden_size":"8","dtype":"BF16","last_kind":"post","boot_id":"boot",'
    b'"rank":"0","counter":"7","weights":"w"},'
    b'"aux":{"dtype":"BF16","shape":[3,24],"data_offsets":[0,144]},'
    b'"last":{"dtype":"BF16","shape":[3,8],"data_offsets":[144,192]},'
    b'"input_ids":{"dtype":"I32","shape":[3],"data_offsets":[192,204]}}'
)
OLD_KEYS = (
    "pid_namespace", "weights", "weights_layout", "weights_s", "weight_version", "settings",
    "quantization", "kv_cache_dtype",
)  # fmt: skip


def test_the_bytes_of_ready_do_not_change() -> None:
    ready = make_ready(
        quantization="fp8", weights="w+1", settings={"torch": "2"}, pid_namespace="pid:[1]"
    )
    assert encode_ready(ready) == READY_BYTES
    assert decode_ready(READY_BYTES) == ready
    assert ready.model.quantization == "fp8" and ready.weights.id == "w+1"


def test_a_ready_of_an_older_plugin_lacks_what_came_later() -> None:
    document = json.loads(READY_BYTES)
    for name in OLD_KEYS:
        del document[name]
    ready = decode_ready(json.dumps(document).encode())
    assert ready == make_ready()
    assert (ready.weights.id, ready.process.namespace, ready.engine.settings) == (None, None, {})


def test_the_bytes_of_a_header_do_not_change() -> None:
    header = make_header(weights="w")
    assert encode_header(header) == struct.pack("<Q", 440) + HEADER_TEXT.ljust(440)
    dump = decode_header(encode_header(header), file_bytes=448 + 204)
    assert dump.header == header


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 0), ("dtype", "F64"), ("boundaries", []), ("last_kind", "x")]
)
def test_a_ready_of_states_that_no_model_has_is_refused(key: str, value: object) -> None:
    document = json.loads(READY_BYTES) | {key: value}
    with pytest.raises(DumpFormatError, match=f"unreadable READY.json: .*{key}"):
        decode_ready(json.dumps(document).encode())


BAD_FACTS: list[tuple[str, object]] = [
    ("pid", 0), ("pid", 1 << 31), ("pid", True), ("pid", "1"), ("pid_start_ticks", -1),
    ("port", 65536), ("port", 30000.0), ("rank", -1), ("rank", 1 << 20), ("dp_size", 10**9),
    ("dp_size", 0), ("tp_size", None), ("radix_cache", 1), ("boundaries", "1,2"),
    ("boundaries", [1, 2.0]), ("boundaries", list(range(5000))), ("boundaries", {"1": 2}),
    ("hidden_size", 1e300), ("vocab_size", 1 << 40), ("num_layers", []), ("model_path", 3),
    ("model_path", "x" * 5000), ("model_path", "\ud800"), ("quantization", ["fp8"]),
    ("weights", {}), ("weights_s", "1"), ("weights_s", -1), ("settings", []),
    ("settings", {"torch": 2}), ("settings", {str(i): "" for i in range(5000)}),
    ("settings", {"x" * 5000: ""}), ("rid_prefix", None), ("host", b"".hex),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_FACTS, ids=lambda value: str(value)[:20])
def test_a_ready_with_a_value_of_another_type_or_range_is_refused(key: str, value: object) -> None:
    document = json.loads(READY_BYTES) | {key: value}
    with pytest.raises(DumpFormatError, match=r"unreadable READY\.json: ") as caught:
        decode_ready(json.dumps(document, default=lambda _: 1).encode())
    assert key in str(caught.value) or "name" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"[]", b"null", b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe",
        READY_BYTES.replace(b'"rank": 0', b'"rank": Infinity'),
        READY_BYTES.replace(b'"rank": 0', b'"rank": NaN'),
        READY_BYTES.replace(b'"rank": 0', b'"rank": ' + b"9" * 5000),
        READY_BYTES.replace(b'"format_version": 1', b'"format_version": [1]'),
    ],
    ids=range(12),
)  # fmt: skip
def test_bytes_that_are_no_document_are_refused(data: bytes) -> None:
    for decode in (decode_ready, decode_error, decode_failed):
        with pytest.raises(DumpFormatError):
            decode(data)


def test_a_failed_record_is_read_back_also_of_a_plugin_without_a_pid() -> None:
    record = FailedRecord(reason="out of\nmemory", pid=7)
    assert decode_failed(encode_failed(record)) == record
    assert decode_failed(b'{"reason": "r"}') == FailedRecord(reason="r", pid=None)
    for data in (b'{"reason": 1}', b'{"reason": "r", "pid": -1}', b'{"reason": "r", "pid": 1e5}'):
        with pytest.raises(DumpFormatError, match=r"unreadable FAILED\.json"):
            decode_failed(data)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"rows":"3"', b'"rows":Infinity'), (b'"rows":"3"', b'"rows":3'),
        (b'"rows":"3"', b'"rows":"1e9"'), (b'"rows":"3"', b'"rows":"+3"'),
        (b'"rows":"3"', b'"rows":" 3"'), (b'"rows":"3"', b'"rows":"\xd9\xa3"'),
        (b'"rid":"xtr-run-session-0-1"', b'"rid":{"a":[1]}'), (b'"rank":"0"', b'"rank":null'),
        (b'"boundaries":"1,2,3"', b'"boundaries":[1,2,3]'),
        (b'"boundaries":"1,2,3"', b'"boundaries":"' + b"1," * 3000 + b'3"'),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_header_with_a_value_of_another_type_is_refused(before: bytes, after: bytes) -> None:
    text = HEADER_TEXT.replace(before, after)
    assert text != HEADER_TEXT
    padded = text + b" " * (-(8 + len(text)) % 64)
    with pytest.raises(DumpFormatError) as caught:
        decode_header(struct.pack("<Q", len(padded)) + padded, file_bytes=8 + len(padded) + 204)
    assert len(str(caught.value)) < 400


def test_ready_is_read_back_and_unknown_fields_are_ignored() -> None:
    ready = make_ready(quantization="fp8")
    assert decode_ready(encode_ready(ready)) == ready
    document = json.loads(encode_ready(ready)) | {"a_field_of_later": 1}
    assert decode_ready(json.dumps(document).encode()) == ready


@pytest.mark.parametrize("field", ["pid", "boundaries", "boot_id"])
def test_a_ready_without_a_field_is_refused(field: str) -> None:
    document = json.loads(encode_ready(make_ready()))
    del document[field]
    with pytest.raises(DumpFormatError, match="unreadable READY"):
        decode_ready(json.dumps(document).encode())


def test_a_ready_of_another_format_says_what_to_do() -> None:
    document = json.loads(encode_ready(make_ready())) | {"format_version": 2}
    with pytest.raises(DumpFormatError, match="install the same version on both sides"):
        decode_ready(json.dumps(document).encode())


@given(st.integers(0, 10**10 - 1))
def test_names_are_told_apart(counter: int) -> None:
    assert is_dump_name(dump_name(counter))
    assert not is_error_name(dump_name(counter))
    assert is_error_name(error_name(counter))
    assert not is_dump_name(error_name(counter))
    assert not is_dump_name(".tmp-" + dump_name(counter))
    assert not is_dump_name(dump_name(counter) + "\n")

"""Input files: what is read, what is refused, how rows are numbered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prompts import blocks, formats
from prompts.compression import CHUNK_BYTES
from prompts.inputs import InputFile, read_rows, scan_inputs
from prompts.types import InputError


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def rows_of(*paths: Path) -> list[tuple[int, str, int, bytes]]:
    rows = read_rows(scan_inputs(paths))
    return [
        (row.ordinal, Path(row.origin.source).name, row.origin.line, row.data.strip())
        for row in rows
    ]


def test_a_scan_tells_size_digest_and_rows(tmp_path: Path) -> None:
    data = b'{"a":1}\n\n{"a":2}'
    path = write(tmp_path / "a.jsonl", data)
    assert scan_inputs([path]) == (
        InputFile(
            path=str(path),
            size_bytes=16,
            digest=xxhash.xxh3_128_hexdigest(data),
            num_rows=2,
            block_digests=xxhash.xxh3_128_digest(data),
        ),
    )


def test_rows_are_numbered_over_all_files_and_lines_within_each(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", b"{1}\n{2}\n")
    b = write(tmp_path / "b.jsonl", b"{3}\n")
    assert rows_of(a, b) == [
        (0, "a.jsonl", 1, b"{1}"),
        (1, "a.jsonl", 2, b"{2}"),
        (2, "b.jsonl", 1, b"{3}"),
    ]


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\n{1}\n  \t\r\n\r\n{2}\n\n")
    assert rows_of(path) == [(0, "a.jsonl", 2, b"{1}"), (1, "a.jsonl", 5, b"{2}")]


def test_windows_line_ends_and_a_last_line_without_one_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"{1}\r\n{2}")
    assert [row[3] for row in rows_of(path)] == [b"{1}", b"{2}"]


def test_one_byte_order_mark_is_dropped_from_each_file_and_no_more(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    a = write(tmp_path / "a.jsonl", bom + b"{1}\n" + bom + b"{2}\n")
    b = write(tmp_path / "b.jsonl", bom + b"\n" + b"{3}\n")
    assert [row[3] for row in rows_of(a, b)] == [b"{1}", bom + b"{2}", b"{3}"]


def test_unicode_line_separators_split_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text":"a\u2028b\u0085c"}\n'.encode())
    assert len(rows_of(path)) == 1


def test_a_line_longer_than_a_chunk_is_one_row(tmp_path: Path) -> None:
    data = b'{"text":"' + b"x" * (3 * CHUNK_BYTES) + b'"}'
    path = write(tmp_path / "a.jsonl", data + b"\n{2}\n")
    assert [row[3] for row in rows_of(path)] == [data, b"{2}"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary(max_size=40).map(
        lambda b: b.translate(bytes(b"\n \r{}x"[i % 6] for i in range(256)))
    )
)
def test_scan_and_read_agree_on_the_rows_wherever_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 3)
    path = write(tmp_path / "a.jsonl", data)
    expected = [(n, line) for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    if not expected:
        with pytest.raises(InputError, match="no rows"):
            scan_inputs([path])
        return
    assert [
        (row.origin.line, row.data.rstrip(b"\n")) for row in read_rows(scan_inputs([path]))
    ] == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no rows: give a file with one JSON object"),
        (b"\n \n", "no rows"),
        (b"BZh91AY", "bzip2 is not supported: decompress it"),
        ('{"text":"a"}'.encode("utf-16"), "UTF-16.*convert it to UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", data)
    with pytest.raises(InputError, match=message) as caught:
        scan_inputs([path])
    assert str(path) in str(caught.value)


def test_a_missing_file_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused: list[tuple[Path | str, str]] = [
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "not a regular file"),
        ("nul\0", "cannot be opened"),
    ]
    for path, message in refused:
        with pytest.raises(InputError, match=message):
            scan_inputs([path])


@pytest.mark.parametrize("later", [b"{1}\n", b"{1}\n{3}\n", b"{1}\n{2}\n{3}\n", b""])
def test_a_file_that_changed_after_the_scan_gives_no_row(tmp_path: Path, later: bytes) -> None:
    path = write(tmp_path / "a.jsonl", b"{1}\n{2}\n")
    files = scan_inputs([path])
    path.write_bytes(later)
    with pytest.raises(InputError, match=r"a\.jsonl: changed after it was scanned\. No prompt"):
        next(read_rows(files))


def test_a_file_that_ends_at_a_block_boundary_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4)
    path = write(tmp_path / "a.jsonl", b"{1}\n{2}\n")
    files = scan_inputs([path])
    assert len(files[0].block_digests) == 2 * blocks.DIGEST_BYTES
    assert [row.data for row in read_rows(files)] == [b"{1}\n", b"{2}\n"]
    path.write_bytes(b"{1}\n{2}\n{3}\n")
    monkeypatch.setattr(formats, "CHUNK_BYTES", 4)
    rows = read_rows(files)
    assert [next(rows).data, next(rows).data] == [b"{1}\n", b"{2}\n"]
    with pytest.raises(InputError, match="changed after it was scanned"):
        next(rows)


def test_a_file_that_grows_during_the_scan_is_detected_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", b"{1}\n")

    def count_parts(data: bytes) -> int:
        with path.open("ab") as file:
            file.write(b"{2}\n")
        return 1

    files = scan_inputs([path], count_parts=count_parts)
    assert (files[0].num_rows, files[0].size_bytes) == (1, 4)
    with pytest.raises(InputError, match="changed after it was scanned"):
        next(read_rows(files))

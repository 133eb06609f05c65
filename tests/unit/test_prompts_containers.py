"""What a prompt file may be wrapped in: told by its content, read in constant memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_files import FORMS, as_array, as_arrow_file, as_arrow_stream, as_jsonl, as_parquet

from prompts import compression, formats
from prompts.blocks import BlockFile
from prompts.dialects import decode_row
from prompts.formats import open_container
from prompts.inputs import read_rows, scan_inputs
from prompts.json_array import array_elements
from prompts.paths import SPOOL_NAME, Spool, find_files
from prompts.reading_options import ReadingOptions
from prompts.sniff import NUM_ROWS, require_fields, require_rows
from prompts.types import InputError, RowError, RowReason

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {"id": f"a_{n}", "conversations": [{"from": "human", "value": f"q{n}\u2028é"}]}
    for n in range(200)
]


def plain(data: bytes) -> bytes:
    return data


def gzip_members(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


def zstd_frames(data: bytes) -> bytes:
    half = len(data) // 2
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


def documents(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [orjson.loads(row.data) for row in read_rows(scan_inputs([path]), **options)]


@pytest.mark.parametrize("pack", [plain, gzip_members, zstd_frames], ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_case_73_the_same_rows_come_out_of_every_container_whatever_its_name(
    tmp_path: Path,
    form: Callable[[list[dict[str, Any]]], bytes],
    pack: Callable[[bytes], bytes],
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(pack(form(ROWS)))
    (file,) = scan_inputs([path])
    assert (file.num_rows, file.size_bytes) == (len(ROWS), path.stat().st_size)
    assert documents(path) == ROWS


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_skipped_rows_keep_their_numbers(
    tmp_path: Path, form: Callable[[list[dict[str, Any]]], bytes]
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(form(ROWS))
    rows = list(read_rows(scan_inputs([path]), skip=lambda ordinal: ordinal < 150))
    assert [row.ordinal for row in rows] == list(range(150, 200))
    assert [orjson.loads(row.data)["id"] for row in rows] == [f"a_{n}" for n in range(150, 200)]


def test_a_finished_row_group_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(ROWS))
    groups: list[list[int]] = []
    read = pq.ParquetFile.iter_batches

    def watch(file: Any, **options: Any) -> Any:
        groups.append(options["row_groups"])
        return read(file, **options)

    files = scan_inputs([path])
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watch)
    rows = list(read_rows(files, skip=lambda ordinal: ordinal < 140))
    assert (len(rows), groups) == (60, [[2]])


def test_files_of_all_kinds_are_numbered_through(tmp_path: Path) -> None:
    for form in FORMS:
        (tmp_path / form.__name__).write_bytes(form(ROWS[:3]))
    files = scan_inputs(sorted(tmp_path.iterdir()))
    rows = list(read_rows(files))
    assert [row.ordinal for row in rows] == list(range(3 * len(FORMS)))
    assert [row.origin.line for row in rows] == [1, 2, 3] * len(FORMS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a": 1}, {"a": ', "beyond its element 1: it is truncated: copy the file again"),
        (b'[{"a": 1}] {"a": 2}', "beyond its element 1: there is other data after it"),
        (b'[{"a": 1}, {"a": "]}', "beyond its element 1: it is truncated: copy the file again"),
        (b'[{"a": 1}, ]', "beyond its element 1: an element is missing"),
        (b'[, {"a": 1}]', "beyond its element 0: an element is missing"),
        (b'[{"a": 1}}', "beyond its element 1: there is an unmatched closing bracket"),
        (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "compressed twice"),
        ('{"text": "a"}'.encode("utf-16-le"), "UTF-16 without its mark"),
        (b'[{"a": 1}]\n[{"a": 2}]', "rows of lists are not supported"),
        (b"[]", "no rows"),
        (gzip.compress(as_jsonl(ROWS), mtime=0)[:-20], "damaged or cut off"),
        (zstandard.compress(as_jsonl(ROWS))[:-20], "damaged or cut off"),
        (b"\x28\xb5\x2f\xfd....", "damaged or cut off"),
        (b"PAR1....", "damaged or cut off"),
        (as_arrow_stream(ROWS)[:-400], "damaged or cut off|cannot be read"),
    ],
)
def test_a_damaged_file_is_an_error_and_never_a_shorter_one(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        scan_inputs([path])
    assert str(path) in str(caught.value)


def test_case_83_a_column_that_is_null_first_and_text_later_is_no_trouble(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "note": None},
        {"text": "b", "note": "x"},
        {"text": "c", "note": [1]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl(rows))
    assert documents(path) == rows


def test_case_84_a_byte_order_mark_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + as_jsonl(ROWS))
    assert documents(path) == ROWS
    path.write_bytes(as_jsonl(ROWS).decode().encode("utf-16"))
    with pytest.raises(InputError, match="UTF-16"):
        scan_inputs([path])


json_rows = st.dictionaries(
    st.text(max_size=3),
    st.none() | st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=3) | st.floats(-9, 9),
    max_size=3,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(json_rows, min_size=1, max_size=5), indent=st.none() | st.integers(0, 2))
def test_an_array_gives_what_its_lines_would(
    tmp_path: Path, rows: list[dict[str, Any]], indent: int | None
) -> None:
    path = tmp_path / "a"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=indent is None))
    assert documents(path) == rows


@pytest.mark.slow
@pytest.mark.parametrize("form", [as_jsonl, as_array, as_parquet, as_arrow_stream])
@pytest.mark.parametrize("pack", [plain, gzip.compress, zstandard.compress])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, form: Callable[..., bytes], pack: Callable[[bytes], bytes]
) -> None:
    def peak_bytes(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}"
        path.write_bytes(pack(form([{"text": f"{n:08d}" * 64} for n in range(num_rows)])))
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_rows(scan_inputs([path]))) == num_rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # imports
    assert peak_bytes(12_000) < peak_bytes(3_000) + (2 << 20)  # the files: 6 MB and 1.5 MB


def test_a_zstd_file_whose_window_takes_much_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=29)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.zst"
    path.write_bytes(compressor.compress(as_jsonl(ROWS)) + compressor.flush())
    with pytest.raises(InputError, match="window is larger than 128 MiB"):
        scan_inputs([path])


def test_an_invalid_element_fails_its_row_and_not_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(
        b'[{"id": 1.5}, {"a": nil}, {"a": NaN}, {"a": -Infinity}, {"a": "\xff"}, {"a": 1],'
        b' {"a": 1} {"a": 2}, 3, {"id": 123456789012345678901234567890}]'
    )
    rows = list(read_rows(scan_inputs([path])))
    assert [decode_row(rows[number].data) for number in (0, 8)] == [
        {"id": 1.5},
        {"id": 1.2345678901234568e29},
    ]
    reasons = []
    for row in rows[1:8]:
        with pytest.raises(RowError) as caught:
            decode_row(row.data)
        reasons.append(caught.value.reason)
    assert reasons == [RowReason.BAD_JSON] * 6 + [RowReason.NOT_AN_OBJECT]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data, extra in [
        ("zstandard", zstandard.compress(b"{}"), "zstd"),
        ("pyarrow", as_arrow_file(ROWS), "parquet"),
        ("pyarrow.parquet", as_parquet(ROWS), "parquet"),
    ]:
        path = tmp_path / name
        path.write_bytes(data)
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, name, None)
            with pytest.raises(InputError) as caught:
                scan_inputs([path])
        assert f"pip install 'hidden-state-extractor[{extra}]'" in str(caught.value)


BOUND = 1 << 21
LARGE = '{"text": "%s"}' % ("x" * (BOUND * 16))


@pytest.fixture
def a_low_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prompts.token_bound.MAX_ROW_BYTES", BOUND)


@pytest.mark.slow
@pytest.mark.usefixtures("a_low_bound")
@pytest.mark.parametrize("pack", [plain, gzip.compress, zstandard.compress])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f'{{"id": 1}}\n{LARGE}\r\n\n{{"id": 2}}\n', [1, 2, 4]),
        (f'\ufeff{LARGE}\n{{"id": 1}}\n{{"id": 2}}', [1, 2, 3]),
        (f'{{"id": 1}}\n{{"id": 2}}\n{LARGE}', [1, 2, 3]),
        (f'{{"id": 1}}\n{" " * BOUND * 4}\n{LARGE}\n{{"id": 2}}', [1, 3, 4]),
        (f'[{{"id": 1}}, {LARGE},\n{{"id": 2}}]', [1, 2, 3]),
        (f'\ufeff [ {LARGE}{" " * BOUND * 4}, {{"id": 1}}, {{"id": 2}} ] ', [1, 2, 3]),
    ],
)
def test_a_row_of_too_many_bytes_fails_alone_and_is_not_held_in_memory(
    tmp_path: Path, text: str, lines: list[int], pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(text.encode()))
    tracemalloc.start()
    try:
        require_rows(str(path))
        files = scan_inputs([path])
        rows = list(read_rows(files))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20  # the row: 32 MiB
    assert [row.origin.line for row in rows] == lines
    assert [row.data.strip() for row in rows if row.data] == [b'{"id": 1}', b'{"id": 2}']
    (large,) = [row for row in rows if not row.data]
    with pytest.raises(RowError, match="row_too_large: the row has more than 2 MiB"):
        decode_row(large.data)
    skipped = list(read_rows(files, skip=lambda ordinal: ordinal != large.ordinal))
    assert [row.origin.line for row in skipped] == [large.origin.line]


@pytest.mark.usefixtures("a_low_bound")
@pytest.mark.parametrize("extra", [0, 1])
def test_the_size_limit_of_a_row_is_exact(tmp_path: Path, extra: int) -> None:
    row = b'{"text": "%s"}' % (b"x" * (BOUND - 12 + extra))
    for data in (row, row + b"\n", row + b"\n{}\n", b"[" + row + b"]"):
        (tmp_path / "a").write_bytes(data)
        first, *_ = read_rows(scan_inputs([tmp_path / "a"]))
        assert len(first.data.strip()) == (0 if extra else BOUND)


@pytest.mark.parametrize("chunk_bytes", [2, 3, 5, 7, 64])
def test_elements_are_split_correctly_at_every_chunk_boundary(chunk_bytes: int) -> None:
    elements = [
        b'{"a": "\\\\", "b": [1, {"c": "]}"}]}',
        b'{"\\"": "\\\\\\"", "d": ",[{"}',
        b"[[1, 2], {}]",
        b'"\\\\\\\\"',
        b"1.50",
    ]
    data = b" [" + b" ,\n".join(elements) + b" ] \n"
    assert list(array_elements(io.BytesIO(data), chunk_bytes)) == elements


def test_deep_nesting_neither_exhausts_memory_nor_fails_the_file(tmp_path: Path) -> None:
    deep = b'{"a": %s1%s}' % (b"[" * 40_000, b"]" * 40_000)
    path = tmp_path / "a"
    path.write_bytes(b"[%s, {}]" % deep)
    tracemalloc.start()
    try:
        rows = list(read_rows(scan_inputs([path])))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # 4 GB if each level stores its path
    finally:
        tracemalloc.stop()
    assert [row.data for row in rows] == [deep, b"{}"]


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t\n"])
def test_blank_lines_are_skipped_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes
) -> None:
    num_blank = 1_000_000
    path = tmp_path / "a"
    path.write_bytes(blank * num_blank + b" {}\n" + blank * 70 + b"  {}")
    num_lines = 0
    isspace = formats.is_blank

    def counted(line: bytes) -> bool:
        nonlocal num_lines
        num_lines += 1
        return isspace(line)

    monkeypatch.setattr(formats, "is_blank", counted)
    rows = list(read_rows(scan_inputs([path])))
    assert [(row.origin.line, row.data) for row in rows] == [
        (num_blank + 1, b" {}\n"),
        (num_blank + 72, b"  {}"),
    ]
    assert num_lines < 1000  # lines read one by one, in two passes


def test_the_digest_is_that_of_the_bytes_on_the_disk(tmp_path: Path) -> None:
    import xxhash

    for form in FORMS:
        path = tmp_path / form.__name__
        path.write_bytes(gzip.compress(form(ROWS)))
        (file,) = scan_inputs([path])
        assert file.digest == xxhash.xxh3_128_hexdigest(path.read_bytes())


@pytest.mark.parametrize("pack", [plain, gzip.compress, zstandard.compress])
def test_opening_a_file_reads_no_more_than_its_beginning(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    chance = random.Random(0)
    path = tmp_path / "a"
    path.write_bytes(pack(as_jsonl([{"text": chance.randbytes(4096).hex()} for _ in range(1200)])))
    assert path.stat().st_size > 4 * compression.CHUNK_BYTES
    with open_container(str(path)) as (_, blocks):
        assert 0 < blocks.size_bytes <= 2 * compression.CHUNK_BYTES


@pytest.mark.parametrize(
    ("data", "looks"),
    [
        (b"id,text\n1,hello\n", "it looks like CSV"),
        (b"Once upon a time\nthere was\n", "it looks like plain text"),
        (b'{"text": "a"}\r{"text": "b"}\r', "a carriage return alone"),
        (b'{\n  "text": "a"\n}\n', "it looks like objects over several lines"),
        (b'{"text": "\xe9"}\n', "it is not UTF-8"),
        (b'{"text": "a", "score": NaN}\n', "NaN and Infinity are not JSON"),
        (b"[1, 2]", "the row is a number"),
        (b"[[1], [2]]", "the row is a list"),
        (b'"a"\n"b"\n', "the row is a string"),
        (b"x\n" * NUM_ROWS + b'{"text": "a"}\n', "it looks like plain text"),
    ],
)
def test_a_file_of_something_else_is_refused_with_what_it_looks_like(
    tmp_path: Path, data: bytes, looks: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        require_rows(str(path))
    assert str(caught.value).startswith(f"{path}: its first rows are no JSON objects: ")
    assert looks in str(caught.value)
    path.write_bytes(b"x\n" * (NUM_ROWS - 1) + b'{"text": "a"}\n')
    require_rows(str(path))


def test_a_field_that_no_row_has_is_refused_with_the_columns_that_are_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"q": "a"}\n{"q": "b", "a": null}\n')
    require_fields(str(path), ReadingOptions(fields=("q", "a")))
    with pytest.raises(InputError, match=r"--field b: no row has such a column; found: q, a$"):
        require_fields(str(path), ReadingOptions(fields=("q", "b")))


# --- what stands on the command line ----------------------------------------------------------


def test_patterns_are_expanded_in_order_and_must_match(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json", "[x].jsonl"):
        (tmp_path / name).write_bytes(b"{}")
    found = [Path(path).name for path in find_files([tmp_path / "*.jsonl"])]
    assert found == ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert find_files([tmp_path / "[x].jsonl"]) == [str(tmp_path / "[x].jsonl")]
    for words in ([tmp_path / "*.jsonl", tmp_path / "b.jsonl"], ["b.jsonl", "./b.jsonl"]):
        with pytest.raises(InputError, match=r"b.jsonl: the same file is given twice"):
            find_files(words)
    with pytest.raises(InputError, match="no file matches"):
        find_files([tmp_path / "*.parquet"])


def test_a_hugging_face_dataset_directory_gives_its_files_in_its_own_order(tmp_path: Path) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(as_arrow_stream(ROWS[number * 100 : (number + 1) * 100]))
    (tmp_path / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (tmp_path / "state.json").write_text(json.dumps(state))
    rows = list(read_rows(scan_inputs(find_files([tmp_path]))))
    assert [orjson.loads(row.data) for row in rows] == ROWS


def test_other_directories_say_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a directory: name the files in it"):
        find_files([tmp_path])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"several splits: name .*train or .*test"):
        find_files([tmp_path])
    (tmp_path / "dataset_dict.json").unlink()
    state = {"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="flatten_indices"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "[]", "state.json is an array, must be an object"),
        ("state.json", "\0", "state.json is not JSON"),
        ("state.json", "[" * 100_000, "state.json is not JSON"),
        ("state.json", '{"_data_files": {}}', "_data_files is an object, must be an array"),
        ("state.json", '{"_data_files": [1]}', "_data_files.0 is 1, must be an object"),
        ("state.json", '{"_data_files": [{}]}', "_data_files.0.filename is missing"),
        ("state.json", '{"_data_files": [{"filename": 3}]}', "is 3, must be a string"),
        ("state.json", '{"_data_files": [{"filename": "../secret"}]}', "names '../secret'"),
        ("state.json", '{"_data_files": [{"filename": "/etc/passwd"}]}', "names '/etc/passwd'"),
        ("state.json", '{"_data_files": [{"filename": ".."}]}', r"names '\.\.'"),
        ("state.json", '{"_data_files": [{"filename": "link"}]}', "names 'link'"),
        ("state.json", '{"_data_files": [{"filename": "a\\u0000"}]}', "which is not a file in"),
        ("dataset_dict.json", "3", "dataset_dict.json is 3, must be an object"),
        ("dataset_dict.json", '{"splits": 3}', "splits is 3, must be an array"),
        ("dataset_dict.json", "{}", "splits is missing"),
    ],
)
def test_a_dataset_directory_that_somebody_made_up_is_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / "secret").write_bytes(as_jsonl(ROWS))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message):
        find_files([folder])


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_dataset_directorys_own_files_are_regular_and_small(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        find_files([tmp_path])
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(InputError, match="larger than"):
        find_files([tmp_path])


def test_a_link_within_a_dataset_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(as_arrow_stream(ROWS))
    (tmp_path / "data.arrow").symlink_to("blob")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    assert scan_inputs(find_files([tmp_path]))[0].num_rows == len(ROWS)


def test_standard_input_is_kept_so_that_a_later_run_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / SPOOL_NAME
    spool = Spool(tmp_path)
    with pytest.raises(InputError, match="standard input is empty"):
        spool.keep(io.BytesIO(b""))
    for again in (b"{}\n", b"", b"{}\n"):
        spool.keep(io.BytesIO(again))
        assert path.read_bytes() == b"{}\n"
    with pytest.raises(InputError, match=r"not what .*stdin holds of an earlier run"):
        spool.keep(io.BytesIO(b"{ }"))
    assert [p.name for p in tmp_path.iterdir()] == ["stdin"]
    assert path.read_bytes() == b"{}\n"


# --- files that change while they are read ----------------------------------------------------


def large_rows(mark: str) -> list[dict[str, Any]]:
    """3 MiB of incompressible JSON, of the same size for each one-letter `mark`."""
    chance = random.Random(0)
    return [{"text": mark + chance.randbytes(4096).hex()} for _ in range(384)]


def as_large_groups(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=64, **options)
    return sink.getvalue()


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file in place, as `cp` does, and restore its times."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", ["content", "truncated", "appended"])
@pytest.mark.parametrize(
    "pack", [plain, partial(gzip.compress, compresslevel=1), zstandard.compress]
)
@pytest.mark.parametrize(
    "form", [as_jsonl, as_array, as_large_groups, as_arrow_stream, as_arrow_file]
)
def test_rows_are_made_from_scanned_bytes_only(
    tmp_path: Path,
    form: Callable[[list[dict[str, Any]]], bytes],
    pack: Callable[[bytes], bytes],
    change: str,
) -> None:
    old, new = large_rows("o"), large_rows("n")
    path = tmp_path / "a"
    path.write_bytes(pack(form(old)))
    size_bytes = path.stat().st_size
    files = scan_inputs([path])
    rows = read_rows(files)
    given = [orjson.loads(next(rows).data)]
    match change:
        case "content":
            overwrite(path, pack(form(new)))
            if pack is plain:
                assert path.stat().st_size == size_bytes
        case "truncated":
            overwrite(path, path.read_bytes()[: size_bytes // 2])
        case "appended":
            overwrite(path, pack(form(old)) + pack(form(new)))
    if form in (as_large_groups, as_arrow_stream, as_arrow_file) and pack is not plain:
        # Its bytes were checked when they were unpacked to a temporary file.
        given += [orjson.loads(row.data) for row in rows]
        assert given == old
    else:
        with pytest.raises(InputError, match="changed after it was scanned"):
            for row in rows:
                given.append(orjson.loads(row.data))
        assert given == old[: len(given)]
    with pytest.raises(InputError, match="changed after it was scanned"):
        list(read_rows(files))


def test_rows_of_a_parquet_file_are_counted_in_the_bytes_that_were_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(as_large_groups(large_rows("o")))
    drain = BlockFile.drain

    def replaced_behind(self: BlockFile) -> str:
        digest = drain(self)
        overwrite(path, as_large_groups(large_rows("n")[:100]))
        return digest

    monkeypatch.setattr(BlockFile, "drain", replaced_behind)
    with pytest.raises(InputError, match="changed after it was scanned"):
        scan_inputs([path])

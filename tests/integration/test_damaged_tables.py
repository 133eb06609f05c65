"""Damaged Arrow and Parquet files, from seeds: none ends or hangs the process, or fills memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Damages each form `arguments[1]` times; prints the errors that are no InputError, and the peak.
READER = r"""
import io, json, random, sys
import pyarrow as pa
import pyarrow.parquet as pq
from prompts.inputs import read_rows, scan_inputs
from prompts.types import InputError

path, times = sys.argv[1], int(sys.argv[2])
turns = [{"from": "human", "value": "question é"}, {"from": "gpt", "value": "x" * 9}]
rows = [
    {"id": f"a_{n}", "turns": turns * (n % 3), "ids": list(range(n % 9)), "flag": n % 2 == 0,
     "score": n / 3, "colour": ("red", "green", None)[n % 3], "nothing": None}
    for n in range(60)
]
plain = pa.Table.from_pylist(rows)
colour = plain.schema.get_field_index("colour")
colours = plain.column("colour")
coded = plain.set_column(colour, "colour", colours.dictionary_encode())
views = plain.set_column(colour, "colour", colours.cast(pa.string_view()))

def ipc(new, table, compression=None):
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=25)
    return sink.getvalue()

def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=25, **options)
    return sink.getvalue()

forms = [
    ipc(pa.ipc.new_stream, plain), ipc(pa.ipc.new_stream, coded), ipc(pa.ipc.new_stream, views),
    ipc(pa.ipc.new_file, coded), ipc(pa.ipc.new_file, plain, "lz4"),
    ipc(pa.ipc.new_stream, coded, "zstd"),
    parquet(coded), parquet(plain, compression=None, use_dictionary=False),
    parquet(plain, compression="zstd", data_page_version="2.0"),
]
WORDS = [b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0" * 4, b"\xf8\xff\xff\x7f"]

def damaged(data, chance):
    data = bytearray(data)
    if chance.random() < 0.2:
        return data[: chance.randrange(8, len(data))]
    for _ in range(chance.choice([1, 1, 2, 4, 8])):
        place = chance.randrange(8, len(data))
        if chance.random() < 0.6:
            data[place] = chance.randrange(256)
        else:
            place = place // 4 * 4
            data[place : place + 4] = chance.choice(WORDS)
    return data

found, num_refused = [], 0
for seed in range(times):
    for number, form in enumerate(forms):
        print(seed, number, file=sys.stderr, flush=True)  # the last one is to blame for a crash
        with open(path, "wb") as file:
            file.write(damaged(form, random.Random(f"{seed} {number}")))
        try:
            for _ in read_rows(scan_inputs([path])):
                pass
        except InputError:
            num_refused += 1
        except BaseException as error:
            found.append(f"{seed} {number}: {error!r:.200}")
status = open("/proc/self/status").read()  # getrusage knows the peak of whoever started it
peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
print(json.dumps({"found": found, "refused": num_refused, "peak_mib": peak}))
"""


def test_a_damaged_table_is_refused_or_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "file"), "250"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-200:]
    result = json.loads(done.stdout)
    assert result["found"] == []
    assert result["refused"] > 1000
    assert result["peak_mib"] < 300

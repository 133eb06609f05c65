"""Memory of planning a million short rows: read, tokenised, judged, written to the manifest.

    python -m benchmarks.prompts_memory TOKENIZER [--rows 1000000] [--workers 1]

Does what a run does with its rows up to sending them, and prints the resident memory of this
process and of those that tokenise at a tenth of the rows and at the end. Exits with 1 where the
end needs more than 16 MiB beyond a byte for each row (which a run keeps for what is settled).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import orjson
import psutil

from benchmarks.command import Failed, command_parser, number_from, run_command
from extractor.core.admission import Admission, Refusal
from extractor.core.request import Limits
from extractor.core.row_policy import DEFAULT_POLICY
from extractor.dispatch.row_recorder import planned_row
from extractor.intake.prompt_stream import in_thread, pool_for, prompts_of
from manifest.records import Source
from manifest.writer_thread import StoreOwner
from prompts.inputs import scan_inputs
from prompts.reading_options import DEFAULTS

LIMITS = Limits(max_prompt_tokens=4096, vocab_size=2**31, chunk_tokens=4096)
PLANNED_PER_COMMIT = 1000
ALLOWED_BYTES = 16 << 20


def write_rows(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for number in range(count):
            turns = [
                {"role": "user", "content": f"{number} + 1?"},
                {"role": "assistant", "content": f"{number + 1}"},
            ]
            file.write(orjson.dumps({"id": number, "messages": turns}) + b"\n")


def resident_bytes() -> tuple[int, int]:
    """Of this process, and of its children."""
    this = psutil.Process()
    return this.memory_info().rss, sum(one.memory_info().rss for one in this.children())


async def plan(path: Path, tokenizer: str, *, workers: int, rows: int) -> list[tuple[int, int]]:
    files = scan_inputs([path])
    settled = bytearray(rows)
    admission = Admission(DEFAULT_POLICY, LIMITS, None)
    owner = await StoreOwner.open(path.with_name("manifest.sqlite"))
    source = Source(number=0, path="p", size_bytes=0, digest="d", num_rows=rows)
    await owner.call(lambda store: store.begin({}, [source]))
    measured = []
    started = time.monotonic()
    with pool_for(tokenizer, DEFAULTS) as pool:
        prompts = prompts_of(files, pool, num_workers=workers, skip=lambda n: bool(settled[n]))
        count = 0
        async for row in in_thread(prompts):
            judged = admission.judge(row)
            if isinstance(judged, Refusal):
                raise Failed(f"{tokenizer}: {judged.reason}: {judged.detail}")
            owner.post(planned_row(judged, row, 0))
            count += 1
            if count % PLANNED_PER_COMMIT == 0:
                await owner.drain()
            if count in (rows // 10, rows):
                measured.append(resident_bytes())
                seconds = time.monotonic() - started
                print(
                    f"{count:,} rows planned in {seconds:.0f} s: "
                    f"{measured[-1][0] / 2**20:.0f} MiB here, "
                    f"{measured[-1][1] / 2**20:.0f} MiB in {workers} tokenising processes",
                    flush=True,
                )
    await owner.close()
    return measured


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "tokenizer", metavar="TOKENIZER", help="a folder with tokenizer and chat template"
    )
    parser.add_argument(
        "--rows", type=number_from(10), default=1_000_000, help="of the prompt file"
    )
    parser.add_argument("--workers", type=number_from(1), default=1, help="processes that tokenise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        write_rows(path, arguments.rows)
        tenth, end = asyncio.run(
            plan(path, arguments.tokenizer, workers=arguments.workers, rows=arguments.rows)
        )
    grown = [after - before for before, after in zip(tenth, end, strict=True)]
    print(f"grown by {grown[0] / 2**20:.1f} MiB here, {grown[1] / 2**20:.1f} MiB in the others")
    sys.exit(max(grown) > ALLOWED_BYTES + arguments.rows)


if __name__ == "__main__":
    run_command(main)

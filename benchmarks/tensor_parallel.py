"""Tensor parallel on real GPUs: one dump per piece, equal values, equal speed, no hang.

    python -m benchmarks.tensor_parallel --model DIR [--dp-attention] -- --attention-backend triton

Starts at once: a plain server on all GPUs, one with the plugin on all GPUs, one with the plugin on
one GPU, and with `--dp-attention` one more whose GPUs each serve their own requests. DIR has real
(if random) weights: see weights.py. For speed alone, `--no-values` leaves only the two to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.command import Failed, command_parser, number_from, run_command
from benchmarks.engines import Engine, EngineSpec, engines, free_ports
from benchmarks.load import prefill_s, random_prompts
from benchmarks.prefill_overhead import Plan, measure, show
from benchmarks.sinks import extract, run_client, write_prompts
from extractor.dumps.correlator import Match, Piece, tile
from extractor.dumps.dump_reader import DumpFile, DumpWatcher
from extractor.shards.format import decode_shard_header
from prompts.types import Prompt

ANSWER_TIMEOUT_S = 120.0


async def check_dumps(server: Engine, *, seed: int) -> dict[str, Any]:
    """Mixed lengths at once: every prompt's pieces tile it once, with its own tokens."""
    prompts = mixed_prompts(
        48, vocab_size=server.ranks[0].ready.model.vocab_size, longest=6000, seed=seed
    )
    await prefill_s(server.url, prompts, concurrency=48)
    await asyncio.sleep(2.0)
    pieces: dict[int, list[Piece[DumpFile]]] = defaultdict(list)
    wrong = 0
    for _, arrival in DumpWatcher(server.ranks).poll():
        if not isinstance(arrival, DumpFile):
            wrong += 1
            continue
        header = arrival.dump.header
        ordinal = int(header.rid.rpartition("-")[2])
        pieces[ordinal].append(Piece(start=header.start, rows=header.rows, handle=arrival))
        span = arrival.dump.tensors["input_ids"]
        ids = np.frombuffer(arrival.path.read_bytes()[span.begin : span.end], dtype="<i4")
        sent = prompts[ordinal].input_ids[header.start : header.start + header.rows]
        wrong += not np.array_equal(ids, sent)
        arrival.unlink()
    whole = sum(
        tile(pieces[prompt.ordinal], prompt.num_tokens) is Match.COMPLETE for prompt in prompts
    )
    return {
        "prompts": len(prompts),
        "whole": whole,
        "pieces": sum(map(len, pieces.values())),
        "wrong": wrong,
        "writers": len(server.ranks),
        "writers_used": len({p.handle.directory.path for ps in pieces.values() for p in ps}),
        "ready": {
            "tp_size": server.ranks[0].ready.engine.tp_size,
            "dp_size": server.ranks[0].ready.engine.dp_size,
            "boundaries": server.ranks[0].ready.capture.boundaries,
        },
    }


async def extract_and_verify(server: Engine, prompts: Path, out: Path, dump_root: Path) -> None:
    """The real client, and its proof of the result. Raises Failed where that finds anything."""
    await extract(server, prompts, out, dump_root)
    findings, status = await run_client("verify", out)
    if status:
        raise Failed(f"{server.name}: `extractor verify` says:\n{findings.decode()}")


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Relative distance |a - b| / |b| of each row's states, by boundary: p50, p99, max.

    `neighbour` is the same distance between adjacent captured boundaries of one data set: what a
    layer taken for another would show.
    """
    a, b = _states(first), _states(second)
    assert a.keys() == b.keys(), "the data sets hold different prompts"
    by_name: dict[str, list[npt.NDArray[np.float32]]] = defaultdict(list)
    for ordinal in a:
        for name in a[ordinal]:
            by_name[name].append(_distance(a[ordinal][name], b[ordinal][name]))
        names = [name for name in a[ordinal] if name.startswith("h[")]
        for lower, upper in itertools.pairwise(names):
            by_name["neighbour"].append(_distance(b[ordinal][lower], b[ordinal][upper]))
    result = {}
    for name, parts in by_name.items():
        values = np.concatenate(parts)
        result[name] = {
            "p50": float(np.quantile(values, 0.5)),
            "p99": float(np.quantile(values, 0.99)),
            "max": float(values.max()),
        }
    return result


def _distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    difference: npt.NDArray[np.float32] = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return difference


def _states(out: Path) -> dict[int, dict[str, npt.NDArray[np.float32]]]:
    """ordinal -> "h[b]" or "last" -> [N, H] float32."""
    boundaries = json.loads((out / "dataset.json").read_bytes())["boundaries"]
    samples: dict[int, dict[str, npt.NDArray[np.float32]]] = defaultdict(dict)
    for path in sorted((out / "shards").glob("shard-*.safetensors")):
        data = path.read_bytes()
        header = decode_shard_header(data[: 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__")
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in header.items():
            ordinal, _, kind = name.partition(".")
            if kind not in ("aux", "last"):
                continue
            first, end = cast("tuple[int, int]", entry["data_offsets"])
            bits = np.frombuffer(data[begin + first : begin + end], dtype=np.uint16)
            values = (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])  # type: ignore[call-overload]
            if kind == "last":
                samples[int(ordinal)]["last"] = values
                continue
            for boundary, part in zip(
                boundaries, np.split(values, len(boundaries), axis=1), strict=True
            ):
                samples[int(ordinal)][f"h[{boundary}]"] = part
    return samples


async def check_fault(server: Engine, *, seed: int) -> dict[str, Any]:
    """Remove the dump directory while requests run: every rank must go on answering."""
    prompts = random_prompts(
        64, num_tokens=1024, vocab_size=server.ranks[0].ready.model.vocab_size,
        generator=np.random.default_rng(seed),
    )  # fmt: skip
    running = asyncio.create_task(prefill_s(server.url, prompts, concurrency=16))
    await asyncio.sleep(0.2)
    for rank in server.ranks:
        while rank.path.exists():  # files appear in it while it is being removed
            shutil.rmtree(rank.path, ignore_errors=True)
    begun = time.perf_counter()
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        await running
        await prefill_s(server.url, prompts, concurrency=16)
    return {"answered_after_s": time.perf_counter() - begun, "alive": True}


def mixed_prompts(count: int, *, vocab_size: int, longest: int, seed: int) -> list[Prompt]:
    """Prompts of random lengths, 1 to `longest` tokens."""
    generator = np.random.default_rng(seed)
    return [
        replace(prompt, ordinal=number)
        for number, length in enumerate(generator.integers(1, longest, size=count))
        for prompt in random_prompts(
            1, num_tokens=int(length), vocab_size=vocab_size, generator=generator
        )
    ]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    work = Path(tempfile.mkdtemp(prefix="tensor-parallel-", dir="/dev/shm"))
    width = ("--tp-size", str(options.tp))
    layouts: dict[str, tuple[str, ...]] = {"plain": width, "patched": width}
    if options.values:
        layouts["single"] = ("--tp-size", "1")
    if options.dp_attention:
        layouts["dp-attention"] = (*width, "--dp-size", str(options.tp), "--enable-dp-attention")
    ports = free_ports(len(layouts))
    specs = [
        EngineSpec(
            name=name,
            model=options.model,
            port=ports.pop(),
            dump_root=None if name == "plain" else work / "dumps",
            arguments=(*options.arguments, *arguments),
        )
        for name, arguments in layouts.items()
    ]
    report: dict[str, Any] = {"model": options.model, "tp": options.tp}
    plan = Plan(
        tokens_per_round=options.tokens_per_round,
        max_requests=options.max_requests,
        rounds=options.rounds,
        client_rounds=0,
        concurrency=options.concurrency,
    )
    try:
        async with engines(specs, log_directory=options.logs) as running:
            patched = running["patched"]
            report["start_s"] = {name: round(e.start_s, 1) for name, e in running.items()}
            vocab_size = patched.ranks[0].ready.model.vocab_size
            write_prompts(
                work / "prompts.jsonl",
                mixed_prompts(24, vocab_size=vocab_size, longest=3000, seed=1),
            )
            outs: dict[str, Path] = {}
            for name, server in running.items():
                if name == "plain":
                    continue
                report[f"dumps_{name}"] = await check_dumps(server, seed=2)
                _print(f"dumps_{name}", report[f"dumps_{name}"])
                outs[name] = work / f"out-{name}"
                await extract_and_verify(server, work / "prompts.jsonl", outs[name], work / "dumps")
            if options.values:
                outs["again"] = work / "out-again"
                await extract_and_verify(
                    running["single"], work / "prompts.jsonl", outs["again"], work / "dumps"
                )
            for name, out in outs.items():
                if options.values and name != "single":
                    report[f"values_{name}_vs_single"] = compare(out, outs["single"])
                    _print(f"values_{name}_vs_single", report[f"values_{name}_vs_single"])
            report["overhead"] = []
            for prompt_tokens in options.prompt_tokens:
                result = await measure(
                    running["plain"],
                    patched,
                    prompt_tokens=prompt_tokens,
                    plan=plan,
                )
                show(result)
                report["overhead"].append(asdict(result))
            report["fault"] = await check_fault(patched, seed=3)
            _print("fault", report["fault"])
            if options.dp_attention:
                report["fault_dp_attention"] = await check_fault(running["dp-attention"], seed=4)
                _print("fault_dp_attention", report["fault_dp_attention"])
    except Exception as error:
        report["error"] = repr(error)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    return report


def _print(name: str, value: object) -> None:
    print(f"{name}: {json.dumps(value)}", flush=True)


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--tp", type=number_from(1), default=2, help="GPUs of a server")
    parser.add_argument("--dp-attention", action="store_true", help="measure it too")
    parser.add_argument(
        "--no-values",
        dest="values",
        action="store_false",
        help="leave out the server on one GPU, whose states the others' are compared with",
    )
    parser.add_argument(
        "--prompt-tokens", type=number_from(1), nargs="+", default=[2048], help="of each prompt"
    )
    parser.add_argument("--tokens-per-round", type=number_from(1), default=500_000, help="at most")
    parser.add_argument("--max-requests", type=number_from(1), default=2000, help="in one round")
    parser.add_argument("--rounds", type=number_from(1), default=6, help="of each server")
    parser.add_argument("--concurrency", type=number_from(1), default=64, help="requests at once")
    parser.add_argument(
        "--logs", type=Path, default=Path("/tmp/tensor-parallel"), help="of the servers"
    )
    parser.add_argument("--json", type=Path, help="where the report goes too")
    parser.add_argument("arguments", nargs="*", help="SGLang arguments, after --")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    run_command(main)

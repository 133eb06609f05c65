"""A fake SGLang server with the plugin: no model, real HTTP, real dumps.

For trying the client without a GPU, and for faults that a real server will not produce on demand.
The states are a pure function of the tokens before them (`fake_states`), as a causal model's are,
so that every stored value can be checked.

    python -m extractor.testing --dump-root /dev/shm/hidden-states --port 30000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web

from extractor.core.address import url_host
from extractor.core.layout import Layout
from extractor.core.rids import PROBE_SESSION, RID_PREFIX
from extractor.system.process_id import process_start_ticks
from server_patch.dump_format import (
    READY_NAME,
    CaptureInfo,
    DumpHeader,
    EngineInfo,
    ErrorRecord,
    LastKind,
    ModelInfo,
    ProcessInfo,
    Ready,
    StateLayout,
    WeightsInfo,
    dump_name,
    encode_error,
    encode_header,
    encode_ready,
    error_name,
)
from server_patch.settings import BOOT_ID

_HASH_STEP = 0x9E3779B1  # 2**32 divided by the golden ratio: spreads neighbours far apart


#: How long a late answer takes; a test's time-out is shorter.
LATE_S = 1.0
#: Processing time of a request's first copy, while its second copy is refused.
COPY_S = 0.05
#: Pause between two bytes of an answer that drips.
DRIP_S = 0.02


class Fault(StrEnum):
    """What may go wrong with one request."""

    BUSY = "busy"  # answers 503
    TOO_MANY = "too_many"  # answers 429
    ERROR = "error"  # answers 500
    REJECT = "reject"  # answers 400
    LOCKED = "locked"  # answers 401
    DUPLICATE = "duplicate"  # answers 400 as to a gateway's second copy; the first one still dumps
    LOST_COPY = "lost_copy"  # the same, but the first copy ended with its connection: never dumps
    QUEUE_ABORT = "queue_abort"  # answers 200: aborted in the waiting queue
    ODD_REPLY = "odd_reply"  # answers with a field of the wrong type
    DRIP = "drip"  # dumps, and answers one byte at a time without end
    RESET = "reset"  # closes the connection without an answer
    SILENT = "silent"  # dumps, but never answers
    LATE = "late"  # dumps and answers so late that the client has tried again
    CLOSE = "close"  # answers, then closes the connection that the next request was to use
    OTHER_RID = "other_rid"  # answers as if to another request
    DIE = "die"  # the server process ends, as after a device assert
    NO_DUMP = "no_dump"  # answers, but dumps nothing
    SHORT_DUMP = "short_dump"  # the last row is missing
    DOUBLE_DUMP = "double_dump"  # every piece comes twice
    WRONG_IDS = "wrong_ids"  # one token of the dump differs
    NONFINITE = "nonfinite"  # one state is NaN
    WRONG_BOUNDARIES = "wrong_boundaries"
    ERROR_RECORD = "error_record"  # the plugin could not write
    TORN_DUMP = "torn_dump"  # half a file under a final name
    CACHED = "cached"  # the first rows came from the prefix cache
    TRUNCATED = "truncated"  # the server cut the prompt


@dataclass(kw_only=True)
class FakeModel:
    """What the fake server pretends to serve."""

    layout: Layout = field(
        default_factory=lambda: Layout(
            boundaries=(1, 2, 3), hidden_size=8, dtype="BF16", last_kind="post"
        )
    )
    vocab_size: int = 1000
    num_layers: int = 4
    context_length: int = 4096
    model_path: str = "fake/model"
    #: Each number is a checkpoint of the same shape with its own states and fingerprint.
    checkpoint: int = 0
    fingerprint: int | None = None  # announced instead of the checkpoint's own
    weight_version: str = "default"
    kv_cache_dtype: str | None = "auto"
    settings: Mapping[str, str] = field(default_factory=lambda: {"device": "fake"})

    @property
    def weights(self) -> str:
        return f"{self.checkpoint if self.fingerprint is None else self.fingerprint:032x}"


FaultPlan = Callable[[int, str], Fault | None]
"""(number of the request from 0, rid) -> what goes wrong with it."""


def no_faults(number: int, rid: str) -> Fault | None:
    return None


def faults_once(plan: Mapping[int, Fault]) -> FaultPlan:
    """The given faults at the given request numbers, and none elsewhere."""
    return lambda number, rid: plan.get(number)


def fake_states(
    ids: npt.NDArray[np.int32], layout: Layout, *, checkpoint: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """The states of a prompt: name -> [N, width], uint16 bit patterns for 16-bit dtypes.

    Row t depends on ids[0..t] alone, and on the boundary, the column and the checkpoint.
    """
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        prefix = np.cumsum((ids.astype(np.uint64) + 1) * positions * _HASH_STEP)
        states: dict[str, npt.NDArray[Any]] = {}
        for salt, name in enumerate(layout.state_names):
            columns = np.arange(layout.state_width(name), dtype=np.uint64) + salt * 1_000_003
            columns += np.uint64(checkpoint * 7_000_003)
            mixed = (prefix[:, None] + columns[None, :] * _HASH_STEP) * _HASH_STEP
            values = ((mixed >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float32)
            states[name] = _encoded(values / 32768.0 - 1.0, layout.dtype)
    return states


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    match dtype:
        case "F32":
            return values
        case "F16":
            return values.astype(np.float16).view(np.uint16)
        case _:
            # bfloat16 is the upper half of float32.
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


class FakeServer:
    """One fake server and its rank directory. Use `running`."""

    #: Minimum delay of every answer, so that requests that are sent together overlap.
    min_delay_s = 0.002

    def __init__(
        self,
        dump_root: Path,
        *,
        model: FakeModel | None = None,
        chunk_tokens: int = 0,
        delay_s: float = 0.0,
        faults: FaultPlan = no_faults,
        boot_id: str | None = None,
    ) -> None:
        """`chunk_tokens` > 0 cuts prompts into pieces of at most that many rows, out of order."""
        self.model = model or FakeModel()
        self.boot_id = boot_id or secrets.token_hex(4)
        self.directory = dump_root / self.boot_id / "0"
        self.requests: list[str] = []  # rids, in order of arrival
        self.aborted: list[str] = []
        self.peak_concurrency = 0
        self.is_draining = False  # as SGLang after SIGTERM: it serves on, and says so at /health
        self._concurrency = 0
        self._at_work: set[str] = set()
        self._copies: set[asyncio.Task[None]] = set()
        self._chunk_tokens = chunk_tokens
        self._delay_s = delay_s
        self._faults = faults
        self._counter = count()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @asynccontextmanager
    async def running(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Self]:
        """Serve HTTP, or HTTPS with `tls`; `url` is set inside the block."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/health", self._health),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/fake/requests", self._requests),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, host, port, ssl_context=tls)
            await site.start()
            bound = self._runner.addresses[0][1]
            self.url = f"{'http' if tls is None else 'https'}://{url_host(host)}:{bound}"
            self._announce(host, bound)
            yield self
        finally:
            for copy in self._copies:
                copy.cancel()
            await self._runner.cleanup()

    def _announce(self, host: str, port: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        start_ticks = process_start_ticks(pid)
        assert start_ticks is not None
        layout = self.model.layout
        ready = Ready(
            boot_id=self.boot_id,
            rank=0,
            process=ProcessInfo(
                pid=pid,
                start_ticks=start_ticks,
                started_at="1970-01-01T00:00:00+00:00",
                host=host,
                port=port,
            ),
            engine=EngineInfo(
                version="fake",
                tp_size=1,
                dp_size=1,
                chunked_prefill_size=self._chunk_tokens or -1,
                radix_cache=False,
                kv_cache_dtype=self.model.kv_cache_dtype,
                settings=self.model.settings,
            ),
            model=ModelInfo(
                path=self.model.model_path,
                architecture="FakeForCausalLM",
                config_digest="fake",
                vocab_size=self.model.vocab_size,
                num_layers=self.model.num_layers,
                hidden_size=layout.hidden_size,
                dtype=layout.dtype,
            ),
            weights=WeightsInfo(
                id=self.model.weights, layout="fake", version=self.model.weight_version
            ),
            capture=CaptureInfo(
                plugin_version="fake",
                boundaries=layout.boundaries,
                last_kind=_last_kind(layout),
                method="fake",
                rid_prefix=RID_PREFIX,
                ring_bytes=0,
                num_writers=0,
            ),
        )
        self._publish(READY_NAME, encode_ready(ready))

    # --- HTTP --------------------------------------------------------------------------------

    @property
    def _max_input_tokens(self) -> int:
        return self.model.context_length - 6

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model.model_path,
                "tokenizer_path": self.model.model_path,
                "weight_version": self.model.weight_version,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "context_length": self.model.context_length,
                "max_req_input_len": self._max_input_tokens,
                "max_running_requests": 256,
                "version": "fake",
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_draining else 200)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(orjson.loads(await request.read())["rid"])
        return web.Response()

    async def _requests(self, request: web.Request) -> web.Response:
        """Not SGLang's: the rids so far, for a test in another process."""
        return web.json_response(self.requests)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        number, rid = len(self.requests), body["rid"]
        self.requests.append(rid)
        if rid in self._at_work:
            return _duplicate(rid)
        self._at_work.add(rid)
        self._concurrency += 1
        self.peak_concurrency = max(self.peak_concurrency, self._concurrency)
        try:
            await asyncio.sleep(max(self._delay_s, self.min_delay_s))
            return await self._answer(request, rid, body["input_ids"], self._faults(number, rid))
        finally:
            self._concurrency -= 1
            self._at_work.discard(rid)

    async def _answer(
        self, request: web.Request, rid: str, ids: list[int], fault: Fault | None
    ) -> web.StreamResponse:
        if len(ids) >= self._max_input_tokens:
            message = f"The input ({len(ids)} tokens) is longer than the model's context length"
            return web.json_response({"error": {"message": message}}, status=400)
        match fault:
            case Fault.BUSY:
                return web.json_response({"error": {"message": "queue is full"}}, status=503)
            case Fault.TOO_MANY:
                return web.json_response({"error": {"message": "too many"}}, status=429)
            case Fault.DIE:
                os._exit(1)
            case Fault.LATE:
                await asyncio.sleep(LATE_S)
            case Fault.ERROR:
                return web.json_response({"error": {"message": "boom"}}, status=500)
            case Fault.REJECT:
                return web.json_response({"error": {"message": "no"}}, status=400)
            case Fault.LOCKED:
                return web.json_response({"error": "Unauthorized"}, status=401)
            case Fault.DUPLICATE:
                copy = asyncio.create_task(self._dump_later(rid, ids))
                self._copies.add(copy)
                copy.add_done_callback(self._copies.discard)
                return _duplicate(rid)
            case Fault.LOST_COPY:
                return _duplicate(rid)
            case Fault.QUEUE_ABORT:
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                meta = {"id": rid, "finish_reason": reason, "completion_tokens": 0}
                return web.json_response({"text": "", "output_ids": [], "meta_info": meta})
            case Fault.RESET:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        if rid.startswith(RID_PREFIX):
            self.dump(rid, np.array(ids, dtype=np.int32), fault)
        if fault is Fault.SILENT:
            await asyncio.sleep(3600)
        if fault is Fault.DRIP:
            return await _drip(request)
        response = web.json_response(
            {
                "text": "",
                "output_ids": [0],
                "meta_info": {
                    "id": "another" if fault is Fault.OTHER_RID else rid,
                    "finish_reason": {"type": "length", "length": 1},
                    "prompt_tokens": "x"
                    if fault is Fault.ODD_REPLY
                    else len(ids) - (fault is Fault.TRUNCATED),
                    "cached_tokens": 1 if fault is Fault.CACHED else 0,
                    "completion_tokens": 1,
                    "weight_version": self.model.weight_version,
                },
            }
        )
        if fault is Fault.CLOSE:
            await response.prepare(request)
            await response.write_eof()
            assert request.transport is not None
            request.transport.close()
        return response

    async def _dump_later(self, rid: str, ids: list[int]) -> None:
        await asyncio.sleep(COPY_S)
        self.dump(rid, np.array(ids, dtype=np.int32))

    # --- dumps -------------------------------------------------------------------------------

    def dump(self, rid: str, ids: npt.NDArray[np.int32], fault: Fault | None = None) -> None:
        """Write what the plugin would write for one request, with one fault."""
        if fault is Fault.NO_DUMP:
            return
        if fault is Fault.ERROR_RECORD:
            record = ErrorRecord(rid=rid, start=0, reason="no space left on device")
            self._publish(error_name(next(self._counter)), encode_error(record))
            return
        states = fake_states(ids, self.model.layout, checkpoint=self.model.checkpoint)
        if fault is Fault.NONFINITE:
            states["aux"].view(np.uint8)[:] = 0xFF  # every dtype's all-ones pattern is a NaN
        if fault is Fault.WRONG_IDS:
            ids = ids.copy()
            ids[-1] += 1
        end = len(ids) - (fault is Fault.SHORT_DUMP)
        begin = 1 if fault is Fault.CACHED else 0
        step = self._chunk_tokens or len(ids)
        # Last piece first: nothing may depend on the order in which pieces appear.
        for start in reversed(range(begin, end, step)):
            for _ in range(2 if fault is Fault.DOUBLE_DUMP else 1):
                self._dump_piece(rid, ids, states, start, min(start + step, end), fault)

    def _dump_piece(
        self,
        rid: str,
        ids: npt.NDArray[np.int32],
        states: Mapping[str, npt.NDArray[Any]],
        start: int,
        end: int,
        fault: Fault | None,
    ) -> None:
        layout = self.model.layout
        counter = next(self._counter)
        boundaries = layout.boundaries
        if fault is Fault.WRONG_BOUNDARIES:
            boundaries = tuple(boundary + 1 for boundary in boundaries)
        header = DumpHeader(
            rid=rid,
            start=start,
            rows=end - start,
            layout=StateLayout(
                boundaries=boundaries,
                hidden_size=layout.hidden_size,
                dtype=layout.dtype,
                last_kind=_last_kind(layout),
            ),
            boot_id=self.boot_id,
            rank=0,
            counter=counter,
            weights=self.model.weights,
        )
        parts = [encode_header(header)]
        parts += [states[name][start:end].tobytes() for name in layout.state_names]
        parts.append(ids[start:end].astype("<i4").tobytes())
        data = b"".join(parts)
        if fault is Fault.TORN_DUMP:
            data = data[: len(data) // 2]
        try:
            self._publish(dump_name(counter), data)
        except OSError as error:
            # As the plugin does: an error record, or, where not even that fits, nothing.
            record = ErrorRecord(rid=rid, start=start, reason=str(error))
            with suppress(OSError):
                self._publish(error_name(next(self._counter)), encode_error(record))

    def _publish(self, name: str, data: bytes) -> None:
        temporary = self.directory / f".tmp-{name}"
        try:
            temporary.write_bytes(data)
            temporary.rename(self.directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _duplicate(rid: str) -> web.Response:
    message = f"Duplicate request ID detected: {rid}"
    return web.json_response({"error": {"message": message}}, status=400)


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(DRIP_S)
    return response


def _last_kind(layout: Layout) -> LastKind:
    assert layout.last_kind in ("post", "pre", "both")
    return layout.last_kind  # type: ignore[return-value]


def _plan(fault: Fault, *, every: int, row: int | None) -> FaultPlan:
    """With every so manieth request, or with every request about one row."""

    def plan(number: int, rid: str) -> Fault | None:
        if row is None:
            return fault if number % every == every - 1 else None
        *_, session, ordinal, _attempt = rid.split("-")
        is_row = ordinal == str(row) and not session.startswith(PROBE_SESSION)
        return fault if is_row else None

    return plan


async def _serve(options: argparse.Namespace) -> None:
    plan: FaultPlan = no_faults
    if options.fault is not None:
        plan = _plan(Fault(options.fault), every=options.fault_every, row=options.fault_row)
    server = FakeServer(
        options.dump_root,
        chunk_tokens=options.chunk_tokens,
        delay_s=options.delay_s,
        faults=plan,
        boot_id=os.environ.get(BOOT_ID),
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls = None
    if options.tls is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.tls)
    async with server.running(host=options.host, port=options.port, tls=tls):
        print(server.url, flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m extractor.testing",
        description="A fake SGLang server with the plugin: no model, real HTTP, real dumps. "
        "It has no tokenizer, and a vocabulary of 1,000 ids.",
    )
    parser.add_argument(
        "--dump-root", type=Path, required=True, help="what `extractor run` calls --dump-dir"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--tls", type=Path, metavar="PEM", help="serve HTTPS with this certificate and its key"
    )
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="most rows of a piece")
    parser.add_argument("--delay-s", type=float, default=0.0, help="before each answer")
    parser.add_argument(
        "--fault", choices=[fault.value for fault in Fault], help="what goes wrong now and then"
    )
    parser.add_argument(
        "--fault-every", type=int, default=10, metavar="N", help="with every Nth request"
    )
    parser.add_argument(
        "--fault-row", type=int, metavar="N", help="instead, with each request about row N"
    )
    asyncio.run(_serve(parser.parse_args()))

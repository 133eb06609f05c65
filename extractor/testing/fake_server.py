"""A fake SGLang server with the plugin: no model, real HTTP, real dumps.

For trying the client without a GPU, and for faults that a real server will not produce on demand.

    python -m extractor.testing --dump-root /dev/shm/hidden-states-1000 --port 30000
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self

import numpy as np
import orjson
from aiohttp import web

from extractor.core.address import url_host
from extractor.core.rids import RID_PREFIX
from extractor.testing.fake_model import FakeModel
from extractor.testing.fake_plugin import FakePlugin
from extractor.testing.faults import COPY_S, DRIP_S, LATE_S, Fault, FaultPlan, no_faults
from server_patch.settings import DEFAULT_FILE_MODE

#: Faults that are an error reply and nothing else: its status and message.
ERRORS: Final[Mapping[Fault, tuple[int, str]]] = {
    Fault.BUSY: (503, "queue is full"),
    Fault.TOO_MANY: (429, "too many"),
    Fault.ERROR: (500, "boom"),
    Fault.REJECT: (400, "no"),
}


class FakeServer(FakePlugin):
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
        file_mode: int = DEFAULT_FILE_MODE,
    ) -> None:
        """`chunk_tokens` > 0 cuts prompts into pieces of at most that many rows, out of order."""
        super().__init__(
            dump_root,
            model=model or FakeModel(),
            chunk_tokens=chunk_tokens,
            boot_id=boot_id,
            file_mode=file_mode,
        )
        self.url = ""
        self.requests: list[str] = []  # rids, in order of arrival
        self.aborted: list[str] = []
        self.peak_concurrency = 0
        self.is_draining = False  # as SGLang after SIGTERM: it serves on, and says so at /health
        self._at_work: set[str] = set()  # rids
        self._copies: set[asyncio.Task[None]] = set()
        self._delay_s = delay_s
        self._faults = faults

    @property
    def num_at_work(self) -> int:
        """Requests that have no answer yet."""
        return len(self._at_work)

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
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=tls)
            await site.start()
            bound = runner.addresses[0][1]
            self.url = f"{'http' if tls is None else 'https'}://{url_host(host)}:{bound}"
            self.announce(host, bound)
            yield self
        finally:
            for copy in self._copies:
                copy.cancel()
            await runner.cleanup()

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
        self.peak_concurrency = max(self.peak_concurrency, self.num_at_work)
        try:
            await asyncio.sleep(max(self._delay_s, self.min_delay_s))
            return await self._answer(request, rid, body["input_ids"], self._faults(number, rid))
        finally:
            self._at_work.discard(rid)

    async def _answer(
        self, request: web.Request, rid: str, ids: list[int], fault: Fault | None
    ) -> web.StreamResponse:
        if len(ids) >= self._max_input_tokens:
            message = f"The input ({len(ids)} tokens) is longer than the model's context length"
            return _error(400, message)
        match fault:
            case Fault.DIE:
                os._exit(1)
            case Fault.LOCKED:
                return web.json_response({"error": "Unauthorized"}, status=401)
            case Fault.LATE:
                await asyncio.sleep(LATE_S)
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
            case Fault() if fault in ERRORS:
                return _error(*ERRORS[fault])
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


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _duplicate(rid: str) -> web.Response:
    return _error(400, f"Duplicate request ID detected: {rid}")


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(DRIP_S)
    return response

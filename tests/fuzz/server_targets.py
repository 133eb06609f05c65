"""Replies of a server, down to the bytes on the wire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import orjson
from helpers import Ids, prompt_of

from extractor.core.errors import ExtractorError
from extractor.core.request import Request
from extractor.servers.client import Client
from fuzz.mutation import mutated_bytes, mutated_json
from fuzz.target import Run, Target

RID = "xtr-run-session-0-1"
REQUEST = Request(rid=RID, prompt=prompt_of(Ids(ids=(1, 2, 3), mask=(0, 0, 0))))
REPLIES = [
    {"text": "", "output_ids": [0], "meta_info": {
        "id": RID, "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3,
        "cached_tokens": 0, "completion_tokens": 1, "weight_version": "default"}},
    {"text": "", "meta_info": {"id": RID, "finish_reason": {
        "type": "abort", "message": "Abort in waiting queue", "status_code": 503}}},
    {"error": {"message": "The input (3 tokens) is longer than the model's context length"}},
    {"object": "error", "message": f"Duplicate request ID detected: {RID}", "code": 400},
]  # fmt: skip
MODEL = {"model_path": "m", "tokenizer_path": "m", "weight_version": "default"}
INFO = {"context_length": 512, "max_req_input_len": 506, "max_running_requests": 8,
        "max_queued_requests": None, "dp_size": 1, "version": "0.5.11",
        "internal_states": [{"effective_max_running_requests_per_dp": 8}]}  # fmt: skip
TLS_HANDSHAKE = b"\x16"
STATUSES = [200, 200, 200, 200, 400, 401, 404, 429, 500, 503, 302, 204, 100, 999]


class WireServer:
    """Answers each request with `answer(path)`, raw bytes, and closes the connection."""

    def __init__(self) -> None:
        self.answer: Callable[[str], bytes] = lambda path: b""

    async def start(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if (first := await reader.readexactly(1)) == TLS_HANDSHAKE:
                writer.close()  # a trial whether the server speaks TLS
                return
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode()
            _, _, length = head.lower().partition("content-length: ")
            if length:
                await reader.readexactly(int(length.split()[0]))
            writer.write(self.answer(head.split()[1]))
            await writer.drain()
        writer.close()


def _wire(body: bytes, chance: random.Random, *, is_damaged: bool) -> bytes:
    headers = [
        f"HTTP/1.1 {chance.choice(STATUSES)} x",
        chance.choice(["Content-Type: application/json", "Content-Type: \x1b[31m", "X: y"]),
        chance.choice([f"Content-Length: {len(body)}"] * 5 + [
            "Connection: close", "Content-Length: -1", f"Content-Length: {2**63}",
            "Content-Encoding: gzip", "Content-Encoding: zstd", "Transfer-Encoding: chunked",
            f"Location: http://127.0.0.1:9/{'x' * 9000}", "Location: //[", "Set-Cookie: a=b",
        ]),
    ]  # fmt: skip
    data = "\r\n".join(headers).encode() + b"\r\n\r\n" + body
    return mutated_bytes(data, chance) if is_damaged else data


Exchange = Callable[[Client, WireServer, random.Random], Awaitable[None]]


def _with_client(exchange: Exchange) -> Run:
    """A client of a server that answers what `exchange` makes it answer."""
    runner = asyncio.Runner()
    server = WireServer()
    url = runner.run(server.start())

    async def once(chance: random.Random) -> None:
        async with Client(url, concurrency=1, request_timeout_s=5.0) as client:
            await exchange(client, server, chance)

    return lambda chance: runner.run(once(chance))


def prepare_generate(directory: Path) -> Run:
    sound = [orjson.dumps(reply) for reply in REPLIES]

    async def run(client: Client, server: WireServer, chance: random.Random) -> None:
        change = mutated_json if chance.random() < 0.8 else mutated_bytes
        body = change(chance.choice(sound), chance)
        answer = _wire(body, chance, is_damaged=chance.random() < 0.2)
        server.answer = lambda path: answer
        await client.generate(REQUEST)

    return _with_client(run)


def prepare_facts(directory: Path) -> Run:
    sound = {"/model_info": orjson.dumps(MODEL), "/server_info": orjson.dumps(INFO)}

    async def run(client: Client, server: WireServer, chance: random.Random) -> None:
        path = chance.choice(list(sound))
        change = mutated_json if chance.random() < 0.8 else mutated_bytes
        damaged = change(sound[path], chance)
        answers = {
            each: _wire(body, random.Random(0), is_damaged=False) for each, body in sound.items()
        }
        if chance.random() < 0.2:
            answers[path] = _wire(damaged, chance, is_damaged=True)
        else:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(damaged)}\r\n\r\n"
            answers[path] = head.encode() + damaged
        server.answer = lambda path: answers.get(path, b"")
        with suppress(ExtractorError):
            await client.facts()
        await client.is_answering()
        await client.is_draining()

    return _with_client(run)


TARGETS = [
    Target(name="generate", count=1200, prepare=prepare_generate),
    Target(name="facts", count=1000, prepare=prepare_facts),
]

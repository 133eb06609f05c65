"""A server that redirects, repeats the key, writes to the terminal, or answers nonsense."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from helpers import (
    Ids,
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    prompt_of,
    run,
    write_prompts,
)

from extractor.core.checks import ReplyFacts
from extractor.core.errors import BadAddress, ExtractorError, PluginError, first_known
from extractor.core.failure import Failure
from extractor.core.request import Request
from extractor.servers.api_key import API_KEY_VARIABLE
from extractor.servers.client import MAX_LABEL_CHARS, MAX_REDIRECTS, Client
from extractor.testing.fake_server import FakeServer
from manifest.states import State

RID = "xtr-run-session-0-1"
REQUEST = Request(rid=RID, prompt=prompt_of(Ids(ids=(1, 2, 3), mask=(0, 0, 0))))
REPLY = {"meta_info": {"id": RID, "finish_reason": {"type": "length"}, "prompt_tokens": 3}}
KEY = "sk-very-secret-0123456789"
Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The address of a server that answers every request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(handler: Handler) -> AsyncIterator[Client]:
    async with (
        serving(handler) as url,
        Client(url, concurrency=1, request_timeout_s=30.0) as client,
    ):
        yield client


async def reply_to(body: bytes, *, status: int = 200) -> ReplyFacts | Failure:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, content_type="application/json")

    async with client_of(handler) as client:
        return await client.generate(REQUEST)


# --- redirects -----------------------------------------------------------------------------------


class Elsewhere:
    """A server that is not the one that was named: nothing may arrive there."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path} {dict(request.headers)}")
        return web.json_response(REPLY)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_nothing_follows_a_redirect_to_another_origin(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    elsewhere = Elsewhere()
    async with serving(elsewhere.answer) as other:

        async def away(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{other}{request.path}"})

        async with client_of(away) as client:
            for ask in (client.is_answering, client.facts):
                with pytest.raises(BadAddress, match=f"If it is the right one: --server {other}$"):
                    await ask()
            with pytest.raises(BadAddress, match=r"redirects to|another request"):
                await client.generate(REQUEST)
            await client.abort(RID)
            assert not await client.is_healthy()
            assert await client.is_draining() is None
    assert elsewhere.requests == []


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("https://{host}/generate", "https://{host}"),
        ("//evil.example/generate", "http://evil.example:80"),
        ("http://me:hunter2@evil.example:8/x", "http://evil.example:8"),
        ("http://{host}@evil.example/", "http://evil.example:80"),
        ("ftp://{host}/generate", "no address of a server"),
        ("http://[::1/generate", "no address of a server"),
        ("http://{host}:99999999/", "no address of a server"),
        ("javascript:alert(1)", "no address of a server"),
        ("http://{host}\\@evil.example/", "http://evil.example:80"),
        ("http://evil.example\\@{host}/", "{host}/generate is redirected 3 times"),  # ours
        ("/\xff", "no address of a server"),
    ],
)
async def test_scheme_host_and_port_are_what_must_stay(location: str, named: str) -> None:
    async def away(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": location.format(host=request.host)})

    async with client_of(away) as client:
        with pytest.raises(BadAddress) as caught:
            await client.generate(REQUEST)
        assert named.format(host=client.url.removeprefix("http://")) in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("is_absolute", [True, False])
async def test_within_the_server_a_redirect_keeps_method_body_and_key(
    is_absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    given: list[tuple[str, bytes, str | None]] = []

    async def handler(request: web.Request) -> web.Response:
        if not request.path.startswith("/v2"):
            base = f"http://{request.host}" if is_absolute else ""
            return web.Response(status=308, headers={"Location": f"{base}/v2{request.path}"})
        key = request.headers.get("Authorization")
        given.append((request.method, await request.read(), key))
        return web.json_response(REPLY)

    async with client_of(handler) as client:
        assert await client.generate(REQUEST) == ReplyFacts(prompt_tokens=3, cached_tokens=0)
        assert await client.is_healthy()
    assert given == [
        ("POST", REQUEST.to_json(), f"Bearer {KEY}"),
        ("GET", b"", f"Bearer {KEY}"),
    ]


@pytest.mark.parametrize("status", [301, 302, 303])
async def test_a_prompt_does_not_become_another_request(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with client_of(handler) as client:
        with pytest.raises(BadAddress, match=f"answers {status}, which asks for another request"):
            await client.generate(REQUEST)


async def test_a_circle_of_redirects_ends() -> None:
    num_requests = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_requests
        num_requests += 1
        return web.Response(status=307, headers={"Location": "/again"})

    async with client_of(handler) as client:
        with pytest.raises(BadAddress, match="is redirected 3 times and more"):
            await client.facts()
    assert num_requests == MAX_REDIRECTS + 1


class Moved(FakeServer):
    """Serves until its prompts are redirected to another server."""

    target = ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if len(self.requests) >= 3:
            return web.Response(status=307, headers={"Location": f"{self.target}/generate"})
        return await super()._generate(request)


async def test_a_run_ends_at_a_redirect_and_goes_on_later(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(12)
    path, out = write_prompts(tmp_path / "p.jsonl", prompts), tmp_path / "out"
    elsewhere = Elsewhere()
    async with serving(elsewhere.answer) as Moved.target, Moved(dump_root).running() as server:
        with pytest.raises((BadAddress, ExceptionGroup)) as caught:
            await run(options_for(server, path, out), notes)
    error = first_known(caught.value)
    assert isinstance(error, BadAddress)
    assert f"--server {Moved.target}" in str(error)
    assert elsewhere.requests == []
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, out), notes)
    assert_whole(out, prompts)


# --- the key -------------------------------------------------------------------------------------


class Echo(FakeServer):
    """Repeats the headers that it was sent in every answer to a prompt but the canary's."""

    shape: Callable[[str], web.Response]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if len(self.requests) < 1:
            return await super()._generate(request)
        return type(self).shape(request.headers["Authorization"])


@pytest.mark.parametrize(
    "shape",
    [
        lambda key: web.json_response({"error": {"message": f"bad key: {key}"}}, status=400),
        lambda key: web.json_response({"detail": {"headers": {"auth": key}}}, status=400),
        lambda key: web.Response(text=f"\x1b[2J<pre>{key}</pre>", status=400),
        lambda key: web.Response(body=b"\xff" + key.encode(), status=422),
        lambda key: web.json_response(
            {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400, "message": key}}}
        ),
    ],
    ids=["message", "headers", "html", "bytes", "abort"],
)
async def test_a_key_that_the_server_repeats_is_stored_nowhere(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    shape: Callable[[str], web.Response],
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    Echo.shape = shape
    out = tmp_path / "out"
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    async with Echo(dump_root).running() as server:
        summary = await run(options_for(server, path, out), notes)
    assert summary.totals.by_state == {State.FAILED: 3}
    with sqlite3.connect(out / "manifest.sqlite") as database:
        details = [detail for (detail,) in database.execute("SELECT detail FROM prompts")]
    database.close()
    assert len(details) == 3
    assert all("[removed]" in detail and len(detail) < 300 for detail in details)
    assert KEY not in str(notes.messages)
    for file in out.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    "document",
    [
        {"meta_info": {"id": f"Bearer {KEY}"}},
        {"meta_info": {**REPLY["meta_info"], "prompt_tokens": KEY}},
        {"meta_info": {"finish_reason": KEY}},
    ],
)
async def test_a_key_in_a_field_of_a_reply_is_not_repeated(
    document: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    failure = await reply_to(json.dumps(document).encode())
    assert isinstance(failure, Failure)
    assert KEY not in failure.detail
    assert "[removed]" in failure.detail


async def test_a_key_in_the_facts_of_a_server_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "version": KEY, "weight_version": KEY})

    async with client_of(handler) as client:
        facts = await client.facts()
    assert facts.version == facts.weight_version == "[removed]"


@asynccontextmanager
async def bytes_served_by(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address of a server that writes what it likes to a connection."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_key_in_a_broken_answer_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # of a request, or of a handshake that is tried after it
        writer.write(f"HTTP/1.1 200 OK\r\n{KEY}\x01: x\r\n\r\n".encode())
        writer.close()

    async with bytes_served_by(answer) as url:
        async with Client(url, concurrency=1, request_timeout_s=5.0) as client:
            failure = await client.generate(REQUEST)
            with pytest.raises(ExtractorError) as caught:
                await client.facts()
    assert isinstance(failure, Failure)
    shown = "".join(traceback.format_exception(caught.value))
    assert KEY not in failure.detail + shown
    assert "[removed]" in failure.detail
    assert "[removed]" in shown


# --- values --------------------------------------------------------------------------------------

DEEP = b'{"error": ' + b'{"a":' * 900 + b"1" + b"}" * 901


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b"[" * 100_000,
        b'{"meta_info": {"prompt_tokens": NaN}}',
        b'{"meta_info": {"prompt_tokens": 1e999}}',
        b'{"meta_info": {"prompt_tokens": ' + b"9" * 5000 + b"}}",
        b'{"meta_info": {"prompt_tokens": -1}}',
        b'{"meta_info": {"prompt_tokens": [3]}}',
        b'{"meta_info": {"id": "\\ud800"}}',
        b'{"error": {"message": ["a", {"b": 1}]}}',
        b'{"error": true, "message": 7}',
        b"\xff\xfe\x00",
        b"",
        b"null",
    ],
    ids=range(13),
)
async def test_whatever_is_answered_is_one_bounded_failure(body: bytes, status: int) -> None:
    failure = await reply_to(body, status=status)
    assert isinstance(failure, Failure)
    assert len(failure.detail) < 300
    assert failure.detail.encode()


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"version": "x" * (MAX_LABEL_CHARS + 1)}, "version is .* must be of at most 1000"),
        ({"context_length": 1 << 62}, "context_length is .* must be 2147483647 or less"),
        ({"max_req_input_len": 1}, "max_req_input_len is 1, must be 2 or more"),
        ({"internal_states": [0] * 5000}, "internal_states has 5000 entries"),
        ({"internal_states": ["x"]}, "internal_states.0 is 'x', must be an object"),
        ({"max_queued_requests": 1 << 40}, "max_queued_requests is .* or less"),
        ({"max_running_requests": 1e30}, "must be an integer"),
    ],
)
async def test_facts_out_of_their_ranges_are_one_error(
    info: dict[str, object], problem: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", **info})

    async with client_of(handler) as client:
        with pytest.raises(PluginError, match=problem):
            await client.facts()


async def test_endless_headers_end_the_request() -> None:
    sent_bytes = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        line = b"X-More: " + b"y" * 1000 + b"\r\n"
        try:
            while True:
                writer.write(line * 64)
                sent_bytes += len(line) * 64
                await writer.drain()
        except ConnectionError:
            writer.close()

    async with bytes_served_by(answer) as url:
        async with Client(url, concurrency=1, request_timeout_s=30.0) as client:
            failure = await client.generate(REQUEST)
    assert isinstance(failure, Failure)
    assert sent_bytes < 64 << 20

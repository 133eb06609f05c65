"""Replies that a working server never sends: invalid, endless, and slow byte by byte."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from helpers import Ids, prompt_of

from extractor.core.checks import ReplyFacts
from extractor.core.errors import PluginError
from extractor.core.failure import Failure, FailureKind
from extractor.core.request import Request
from extractor.servers.client import MAX_INFO_BYTES, Client
from manifest.states import Reason

RID = "xtr-run-session-0-1"
REQUEST = Request(rid=RID, prompt=prompt_of(Ids(ids=(1, 2, 3), mask=(0, 0, 0))))
Handler = Callable[[web.Request], Any]
META = {"id": RID, "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3,
        "cached_tokens": 0}  # fmt: skip


@asynccontextmanager
async def client_of(handler: Handler, *, request_timeout_s: float = 30.0) -> AsyncIterator[Client]:
    """A client of a server that answers every request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with Client(
            f"http://127.0.0.1:{runner.addresses[0][1]}",
            concurrency=1,
            request_timeout_s=request_timeout_s,
        ) as client:
            yield client
    finally:
        await runner.cleanup()


def answering(document: object, *, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(document, status=status)

    return handler


async def reply_to(document: object, *, status: int = 200) -> ReplyFacts | Failure:
    async with client_of(answering(document, status=status)) as client:
        return await client.generate(REQUEST)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 65536)


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_tokens": "x"}, "meta_info.prompt_tokens is 'x', must be an integer"),
        ({"prompt_tokens": True}, "meta_info.prompt_tokens is true, must be an integer"),
        ({"prompt_tokens": -3}, "meta_info.prompt_tokens is -3, must be 0 or more"),
        ({"prompt_tokens": 3.0}, "meta_info.prompt_tokens is 3.0, must be an integer"),
        ({"prompt_tokens": None}, "meta_info.prompt_tokens is null, must be an integer"),
        ({"cached_tokens": "0"}, "meta_info.cached_tokens is '0', must be an integer"),
        ({"id": 7}, "meta_info.id is 7, must be a string"),
        ({"finish_reason": "abort"}, "meta_info.finish_reason is 'abort', must be an object"),
        ({"finish_reason": {}}, "meta_info.finish_reason.type is missing"),
        (
            {"finish_reason": {"type": "abort", "status_code": "busy"}},
            "meta_info.finish_reason.status_code is 'busy', must be an integer",
        ),
    ],
)
async def test_an_invalid_reply_is_reported_by_its_field(
    changes: dict[str, object], problem: str
) -> None:
    failure = await reply_to({"meta_info": {**META, **changes}})
    assert isinstance(failure, Failure)
    assert failure.detail == f"not an answer of SGLang: {problem}"
    assert (failure.reason, failure.kind) == (Reason.SERVER_ERROR, FailureKind.SERVER)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "meta_info.prompt_tokens is missing"),
        ({"meta_info": []}, "meta_info is an array, must be an object"),
        ([{"meta_info": META}], "the answer is an array, must be an object"),
    ],
)
async def test_a_reply_of_another_shape_says_what_it_is(document: object, problem: str) -> None:
    failure = await reply_to(document)
    assert isinstance(failure, Failure)
    assert failure.detail == f"not an answer of SGLang: {problem}"


@pytest.mark.parametrize(
    "changes", [{}, {"id": None}, {"cached_tokens": None}, {"finish_reason": None}]
)
async def test_fields_that_a_release_leaves_out_are_not_asked_for(
    changes: dict[str, object],
) -> None:
    reply = await reply_to({"meta_info": {**META, **changes}})
    assert reply == ReplyFacts(prompt_tokens=3, cached_tokens=0)


@pytest.mark.parametrize(
    "meta",
    [
        # As SGLang's tokenizer manager writes them: a request that was only queued has no counts.
        {"id": RID, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
         "weight_version": "default", "e2e_latency": 0.1, "completion_tokens": 0},
        {**META, "finish_reason": {"type": "abort", "message": "Aborted", "status_code": None,
                                   "err_type": None}},
        {"id": RID, "finish_reason": {"type": "abort", "status_code": 503,
                                      "message": "The request queue is full."}},
    ],
)  # fmt: skip
async def test_an_abort_that_is_not_about_the_prompt_means_busy(meta: dict[str, object]) -> None:
    failure = await reply_to({"text": "", "output_ids": [], "meta_info": meta})
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.BUSY
    assert failure.detail.startswith("aborted by the server: ")


@pytest.mark.parametrize(
    "document",
    [
        {"error": {"message": f"Duplicate request ID detected: {RID}"}},
        {"object": "error", "message": f"Duplicate request ID detected: {RID}",
         "type": "BadRequest", "param": None, "code": 400},
        {"error": f"Duplicate request ID detected: {RID}"},
        {"detail": f"Duplicate request ID detected: {RID}"},
    ],
)  # fmt: skip
async def test_a_duplicate_is_recognised_in_every_form_of_an_error(document: object) -> None:
    failure = await reply_to(document, status=400)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.COPY


async def test_an_endless_reply_is_read_to_a_bound_and_named() -> None:
    async with client_of(endless) as client:
        failure = await client.generate(REQUEST)
    assert isinstance(failure, Failure)
    assert "more than 1.0 MiB" in failure.detail
    # The server answered: the connection was not lost, and a dump is not expected.
    assert failure.kind is FailureKind.SERVER


async def test_a_reply_that_drips_ends_with_the_request_timeout() -> None:
    async with client_of(dripping, request_timeout_s=0.5) as client:
        failure = await client.generate(REQUEST)
    assert isinstance(failure, Failure)
    assert failure.detail == "no complete reply in 0.5 s (--request-timeout)"
    assert failure.kind is FailureKind.SILENT


async def test_a_servers_self_description_is_read_up_to_a_limit() -> None:
    tracemalloc.start()
    try:
        async with client_of(endless) as client:
            with pytest.raises(PluginError, match=r"/model_info answers with more than 16\.0 MiB"):
                await client.facts()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MAX_INFO_BYTES


async def test_a_compressed_reply_is_decompressed_up_to_a_limit() -> None:
    packed = gzip.compress(bytes(256 << 20))

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    tracemalloc.start()
    try:
        async with client_of(handler) as client:
            failure = await client.generate(REQUEST)
            with pytest.raises(PluginError):
                await client.facts()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(failure, Failure)
    assert peak_bytes < 8 * MAX_INFO_BYTES


@pytest.mark.parametrize("handler", [endless, dripping])
async def test_the_body_of_a_health_check_is_not_read(handler: Handler) -> None:
    async with client_of(handler) as client, asyncio.timeout(5.0):
        assert await client.is_healthy()
        assert await client.is_draining() is False


@pytest.mark.parametrize(
    ("path", "changes", "problem"),
    [
        ("/model_info", {"model_path": None}, "model_path is null, must be a string"),
        ("/model_info", {"model_path": ["x"]}, "model_path is an array, must be a string"),
        ("/model_info", {"tokenizer_path": 3}, "tokenizer_path is 3, must be a string"),
        ("/server_info", {"context_length": "8k"}, "context_length is '8k', must be an integer"),
        ("/server_info", {"context_length": -1}, "context_length is -1, must be 2 or more"),
        ("/server_info", {"max_req_input_len": True},
         "max_req_input_len is true, must be an integer"),
        ("/server_info", {"version": 5}, "version is 5, must be a string"),
        ("/server_info", {"internal_states": {}}, "internal_states is an object, must be an array"),
        ("/server_info", {"internal_states": ["x"]}, "internal_states.0 is 'x', must be an object"),
    ],
)  # fmt: skip
async def test_an_invalid_self_description_is_reported_by_its_field(
    path: str, changes: dict[str, object], problem: str
) -> None:
    documents: dict[str, dict[str, object]] = {
        "/model_info": {"model_path": "m"},
        "/server_info": {"context_length": 512, "version": "1"},
    }
    documents[path] = {**documents[path], **changes}

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(documents[request.path])

    async with client_of(handler) as client:
        with pytest.raises(PluginError) as caught:
            await client.facts()
    assert str(caught.value).endswith(f"answers, but not like SGLang 0.5.11 or newer: {problem}")


async def test_a_reply_that_is_not_an_object_is_not_from_sglang() -> None:
    async with client_of(answering([1])) as client:
        with pytest.raises(PluginError, match="/model_info: the answer is an array, must be an"):
            await client.facts()

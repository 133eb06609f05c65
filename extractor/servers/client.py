"""Edge: HTTP to one SGLang server. Only this and `connection` import an HTTP library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urljoin, urlsplit

import aiohttp
import orjson

from extractor.core.address import origin_of
from extractor.core.checks import ReplyFacts
from extractor.core.errors import (
    BadAddress,
    ExtractorError,
    PluginError,
    ServerUnreachable,
)
from extractor.core.failure import Failure, FailureKind
from extractor.core.foreign_text import MAX_TOLD_CHARS, told
from extractor.core.humanize import amount
from extractor.core.option import MAX_COUNT
from extractor.core.request import Request
from extractor.core.run_options import RunOptions
from extractor.core.timings import DEFAULT_TIMINGS, ClientTimings
from extractor.servers.api_key import API_KEY_VARIABLE, ApiKey, find_api_key
from extractor.servers.connection_errors import about_proxies, detail_of, lasting_problem, own_limit
from extractor.servers.refusals import abort_failure, http_failure
from manifest.states import Reason
from server_patch.fields import (
    Document,
    FieldError,
    array,
    integer,
    mapping,
    object_of,
    optional,
    text,
)

#: A reply to one token is a few hundred bytes; more means the server sends states as JSON.
MAX_REPLY_BYTES = 1 << 20
#: /server_info takes about 20 KiB, and more with many data-parallel ranks.
MAX_INFO_BYTES = 16 << 20
#: Names and labels of a server are data; a message shows less of them.
MAX_NAME_CHARS: Final = 4096
MAX_LABEL_CHARS: Final = 1000
MAX_SCHEDULERS: Final = 4096
#: Statuses that name another address, and those of them after which the same request goes there.
REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
SAME_REQUEST: Final = frozenset((307, 308))
MAX_REDIRECTS: Final = 3
#: The smallest context length that a server can report: one prompt token, one generated token.
MIN_CONTEXT_TOKENS = 2

#: How a request fails that got no complete HTTP response.
TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, ConnectionError)
#: What each of them means: the most specific class that fits decides.
TRANSPORT_FAILURES: Mapping[type[Exception], str] = {
    aiohttp.ClientConnectorCertificateError: "the server's certificate is not trusted",
    aiohttp.ClientSSLError: "TLS failed",
    aiohttp.ClientConnectorDNSError: "the host name cannot be resolved",
    aiohttp.ClientConnectorError: "cannot connect",
    aiohttp.InvalidURL: "the address is not valid",
    aiohttp.ServerDisconnectedError: "the server closed the connection",
    aiohttp.ServerTimeoutError: "the server did not answer in time",
    aiohttp.ClientPayloadError: "the answer broke off",
    aiohttp.ClientOSError: "the connection broke",
    aiohttp.ClientError: "the HTTP exchange failed",
    TimeoutError: "the server did not answer in time",
    ConnectionError: "the connection broke",
}


def transport_problem(error: Exception) -> str:
    """What a transport error means, in words; the most specific entry of TRANSPORT_FAILURES."""
    for kind in type(error).__mro__:
        if kind in TRANSPORT_FAILURES:
            return f"{TRANSPORT_FAILURES[kind]} ({detail_of(error)})"
    raise error


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server says of itself."""

    model_path: str
    tokenizer_path: str
    context_length: int | None
    max_input_tokens: int | None  # prompts of this length and more are refused or cut
    max_requests: int | None  # in flight that it can make use of: running and queued
    version: str
    weight_version: str | None = None  # the engine's label for its weights


class Client:
    """Requests to one server, `concurrency` of them at once at most. An async context manager."""

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        request_timeout_s: float,
        api_key_file: Path | None = None,
        timings: ClientTimings = DEFAULT_TIMINGS.client,
    ) -> None:
        """`api_key_file`: holds the server's key; None: the variable may hold it."""
        self.url = url.rstrip("/")
        self.timings = timings
        self._request_timeout_s = request_timeout_s
        self._concurrency = concurrency
        self._api_key_file = api_key_file
        self._key: ApiKey | None = None
        self._session: aiohttp.ClientSession | None = None
        self.silence = f"no server answers at {self.url}."  # with the cause after a request
        self.has_answered = False  # at all, even with an error

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json"}  # of whatever has a body
        self._key = find_api_key(self._api_key_file)
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.value}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # Room for requests about the server beside those that carry prompts.
                limit=self._concurrency + 4,
                keepalive_timeout=self.timings.keep_alive_s,
            ),
            # A total timeout, since a server that sends a byte now and then could hold a request
            # for ever. The connect timeout is shorter, to know whether a request was sent.
            timeout=aiohttp.ClientTimeout(
                total=self._request_timeout_s,
                sock_connect=min(self.timings.connect_s, self._request_timeout_s / 2),
            ),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy between us and a local server only hides its faults
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def generate(self, request: Request) -> ReplyFacts | Failure:
        """Send one prompt; what the server says of it, or why this attempt failed.

        A failure of the transport or the server is a value here: one bad prompt must not end
        the others. Raises only cancellation, UsageError if this process cannot open another
        connection, and BadAddress if the server names another address.
        """
        try:
            async with await self._send("POST", "/generate", data=request.to_json()) as response:
                data, is_whole = await _bounded(response, MAX_REPLY_BYTES)
                if response.status != 200:
                    return http_failure(response.status, self._told(_message(data)))
        except TRANSPORT_ERRORS as error:
            if (limit := own_limit(error)) is not None:
                raise limit from error
            return self._no_answer(error)
        if not is_whole:
            return Failure(
                reason=Reason.SERVER_ERROR,
                kind=FailureKind.SERVER,
                detail=f"the answer has more than {amount(MAX_REPLY_BYTES)}, where SGLang's has a "
                "few hundred bytes: does something add states or log-probabilities to it?",
            )
        try:
            return self._reply(object_of(data, loads=orjson.loads), rid=request.rid)
        except FieldError as error:
            return Failure(
                reason=Reason.SERVER_ERROR,
                kind=FailureKind.SERVER,
                detail=f"not an answer of SGLang: {self._told(str(error))}",
            )

    def _reply(self, document: Document, *, rid: str) -> ReplyFacts | Failure:
        """Raises FieldError."""
        answered = optional(text, document, "meta_info.id")
        if answered not in (None, rid):
            return Failure(
                reason=Reason.SERVER_ERROR,
                kind=FailureKind.SERVER,
                detail=f"the answer is to request {self._told(repr(answered))}",
            )
        reason = optional(mapping, document, "meta_info.finish_reason")
        if reason is not None and text(document, "meta_info.finish_reason.type") == "abort":
            # A request that was aborted before it began has no token counts.
            path = "meta_info.finish_reason.status_code"
            status = optional(integer, document, path, minimum=100, maximum=599)
            message = optional(text, document, "meta_info.finish_reason.message")
            return abort_failure(status, self._told(message or "no reason given"))
        return ReplyFacts(
            prompt_tokens=integer(document, "meta_info.prompt_tokens", minimum=0),
            cached_tokens=optional(integer, document, "meta_info.cached_tokens", minimum=0) or 0,
            weight_version=self._label(document, "meta_info.weight_version"),
        )

    def _no_answer(self, error: Exception) -> Failure:
        """The failure of a request that ended without an HTTP response.

        A server that took the prompt and is silent may choke on it, which counts as an attempt. A
        server that could not be reached says nothing about the prompt.
        """
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            kind, detail = FailureKind.UNSENT, self._told(transport_problem(error))
        elif isinstance(error, TimeoutError):
            kind = FailureKind.SILENT
            detail = f"no complete reply in {self._request_timeout_s:g} s (--request-timeout)"
        else:
            kind, detail = FailureKind.BROKEN, self._told(transport_problem(error))
        return Failure(reason=Reason.SERVER_ERROR, detail=detail, kind=kind)

    async def abort(self, rid: str) -> None:
        """Ask the server to drop a request. Best effort: an abort may come too late anyway."""
        with suppress(*TRANSPORT_ERRORS, BadAddress):
            data = orjson.dumps({"rid": rid})
            async with await self._send(
                "POST", "/abort_request", data=data, timeout_s=self.timings.abort_s
            ):
                pass

    async def facts(self) -> ServerFacts:
        """The server's description of itself. Raises ServerUnreachable, BadAddress, and PluginError
        if it is not a SGLang server."""
        model = await self._get("/model_info")
        info = await self._get("/server_info")
        try:
            model_path = text(model, "model_path", max_chars=MAX_NAME_CHARS)
            tokenizer_path = optional(text, model, "tokenizer_path", max_chars=MAX_NAME_CHARS)
            return ServerFacts(
                model_path=model_path,
                tokenizer_path=tokenizer_path or model_path,
                context_length=_num_tokens(info, "context_length"),
                max_input_tokens=_num_tokens(info, "max_req_input_len"),
                max_requests=_max_requests(info),
                weight_version=self._label(model, "weight_version"),
                version=self._label(info, "version") or "unknown",
            )
        except FieldError as error:
            raise PluginError(
                f"{self.url} answers, but not like SGLang 0.5.11 or newer: {self._told(str(error))}"
            ) from self._cause(error)

    async def is_answering(self) -> bool:
        """Whether the server answers HTTP requests; if not, `silence` holds the reason.

        Does not run the model. Raises BadAddress if waiting cannot help.
        """
        try:
            await self._get("/model_info", timeout_s=self.timings.answering_s)
        except ServerUnreachable as error:
            self.silence = str(error)
            return False
        except PluginError:
            return True  # whatever it is: what it answers is told by `facts`
        return True

    async def is_healthy(self) -> bool:
        """Whether the server says it can generate. Runs a one-token forward of its own."""
        status, _ = await self._health()
        return status == 200

    async def is_draining(self) -> bool | None:
        """Whether the server is being stopped: it answers what it has, and then ends. None where
        it does not tell.

        SGLang says 503 at /health from then on, at once; later than that, 503 means no more than
        that the forward which such a question may cost took too long.
        """
        status, took_s = await self._health()
        if status == 503 and took_s < self.timings.at_once_s:
            return True
        return False if status == 200 else None

    async def _health(self) -> tuple[int | None, float]:
        """The HTTP status of /health, None without an answer; and the seconds that it took."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        status: int | None = None
        with suppress(*TRANSPORT_ERRORS, BadAddress):
            async with await self._send(
                "GET", "/health", timeout_s=self.timings.info_s
            ) as response:
                status = response.status
        return status, loop.time() - asked_at

    async def _get(self, path: str, *, timeout_s: float | None = None) -> Document:
        timeout_s = timeout_s or self.timings.info_s
        try:
            async with await self._send("GET", path, timeout_s=timeout_s) as response:
                self.has_answered = True
                data, is_whole = await _bounded(response, MAX_INFO_BYTES)
                if response.status in (401, 403):
                    raise PluginError(
                        f"{self.url}{path} answers {response.status}: it wants "
                        + (
                            f"an API key. Set {API_KEY_VARIABLE}, or name an --api-key-file."
                            if self._key is None
                            else f"another API key than {self._key.origin} holds."
                        )
                    )
                if response.status == 503:
                    raise ServerUnreachable(f"{self.url} is starting or shutting down (503).")
                if response.status != 200:
                    raise PluginError(
                        f"{self.url}{path} answers {response.status}: not a SGLang server?"
                    )
        except (*TRANSPORT_ERRORS, ValueError) as error:
            raise await self._unreached(error) from self._cause(error)
        if not is_whole:
            raise PluginError(
                f"{self.url}{path} answers with more than {amount(MAX_INFO_BYTES)}: "
                "not a SGLang server?"
            )
        try:
            return object_of(data, loads=orjson.loads)
        except FieldError as error:
            raise PluginError(
                f"{self.url}{path}: {self._told(str(error))}. Not a SGLang server?"
            ) from self._cause(error)

    async def _send(
        self, method: str, path: str, *, data: bytes | None = None, timeout_s: float | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of the answer; the caller reads and closes it.

        `timeout_s`: to the end of the answer; None: that of prompts. Redirects are followed within
        the origin of `url` alone, as the prompts and the key are for nobody else. Raises BadAddress
        for any other, and the errors of the transport.
        """
        timeout = self._http.timeout
        if timeout_s is not None:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
        address = f"{self.url}{path}"
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._http.request(
                method, address, data=data, allow_redirects=False, timeout=timeout
            )
            if response.status not in REDIRECTS:
                return response
            location = response.headers.get("Location", "")
            response.release()
            if data is not None and response.status not in SAME_REQUEST:
                raise BadAddress(
                    f"{self.url}{path} answers {response.status}, which asks for another request "
                    "than the one that was sent: not a SGLang server?"
                )
            address = self._within_origin(address, location)
        raise BadAddress(f"{self.url}{path} is redirected {MAX_REDIRECTS} times and more")

    def _within_origin(self, address: str, location: str) -> str:
        """The address that `address` redirects to. Raises BadAddress if it is of another origin."""
        ours = origin_of(address)
        try:
            target = urlsplit(urljoin(address, location))
            found = origin_of(target.geturl()) if location.isascii() else None
        except ValueError:
            found = None
        if found is None:
            raise BadAddress(f"{self.url} redirects to no address of a server")
        if found != ours:
            raise BadAddress(
                f"{self.url} redirects to {self._told(found)}, another server, to which neither "
                f"prompts nor the API key are sent. If it is the right one: --server {found}"
            )
        # Of our own origin, in case the HTTP library reads an address differently.
        return f"{ours}{target.path or '/'}{'?' if target.query else ''}{target.query}"

    def _told(self, words: str, *, max_chars: int = MAX_TOLD_CHARS) -> str:
        """Words of the server for a message: one line, bounded, without our key."""
        secrets = () if self._key is None else (self._key.value,)
        return told(words, secrets=secrets, max_chars=max_chars)

    def _cause(self, error: Exception) -> Exception | None:
        """The error itself, unless its words hold our key: a traceback would show them."""
        return None if self._key is not None and self._key.value in str(error) else error

    def _label(self, document: Document, path: str) -> str | None:
        """A text that is compared and stored. Raises FieldError."""
        label = optional(text, document, path, max_chars=MAX_LABEL_CHARS)
        return None if label is None else self._told(label, max_chars=MAX_LABEL_CHARS)

    async def _unreached(self, error: Exception) -> ExtractorError:
        """The error to raise for a request that got no answer."""
        if (limit := own_limit(error)) is not None:
            return limit
        if (
            problem := await lasting_problem(self.url, error, tls_trial_s=self.timings.tls_trial_s)
        ) is not None:
            return BadAddress(self._told(problem, max_chars=MAX_LABEL_CHARS))
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            what = f"the host name of {self.url} cannot be resolved ({detail_of(error)}): check it"
        else:
            what = f"no server answers at {self.url} ({self._told(transport_problem(error))})"
        return ServerUnreachable(f"{what}.{about_proxies()}")

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Client as an async context manager")
        return self._session


@asynccontextmanager
async def clients_of(
    options: RunOptions, *, default_concurrency: int, timings: ClientTimings
) -> AsyncIterator[list[Client]]:
    """One for each server, open for the length of the block."""
    clients = [
        Client(
            url,
            concurrency=options.load.concurrency or default_concurrency,
            request_timeout_s=options.patience.request_timeout_s,
            api_key_file=options.servers.api_key_file,
            timings=timings,
        )
        for url in options.servers.urls
    ]
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client) for client in clients]


async def wait_until_answering(clients: Sequence[Client], *, timeout_s: float) -> bool:
    """Whether a server answered within `timeout_s`. Raises BadAddress if one never can."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not any(await asyncio.gather(*(client.is_answering() for client in clients))):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(clients[0].timings.poll_s)
    return True


async def _bounded(response: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of the body, and whether they are all of it."""
    data = bytearray()
    while len(data) <= most and (block := await response.content.read(most + 1 - len(data))):
        data += block
    if len(data) <= most:
        return bytes(data), True
    response.close()
    del data[most:]
    return bytes(data), False


def _message(data: bytes) -> str:
    """The server's own words; they never repeat a prompt's text (ids were sent)."""
    try:
        document = object_of(data, loads=orjson.loads)
    except FieldError:
        return data.decode(errors="replace")
    error = document.get("error") or document.get("message") or document.get("detail")
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else data.decode()


def _num_tokens(info: Document, path: str) -> int | None:
    return optional(integer, info, path, minimum=MIN_CONTEXT_TOKENS, maximum=MAX_COUNT)


def _max_requests(info: Document) -> int | None:
    """Requests that are not refused and not idle: each scheduler runs some and queues others.

    >>> _max_requests({"internal_states": [{"effective_max_running_requests_per_dp": 48}]})
    96
    >>> _max_requests({"max_running_requests": 16, "max_queued_requests": 4})
    20
    >>> _max_requests({})
    """
    name = "internal_states.{}.effective_max_running_requests_per_dp"
    num_schedulers = len(optional(array, info, "internal_states") or ())
    if num_schedulers > MAX_SCHEDULERS:
        raise FieldError(f"internal_states has {num_schedulers} entries")
    paths = [name.format(number) for number in range(num_schedulers)] or ["max_running_requests"]
    running = [optional(integer, info, path, maximum=MAX_COUNT) for path in paths]
    queued = optional(integer, info, "max_queued_requests", minimum=0, maximum=MAX_COUNT)
    if any(number is None or number < 1 for number in running):
        return None
    # Where the queue has no end, as many wait as run: enough for the next batch.
    return sum(
        number + (number if queued is None else queued) for number in running if number is not None
    )

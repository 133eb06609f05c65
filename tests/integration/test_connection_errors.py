"""Every cause of a failed connection is named, and waiting may help with some of them only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers import Notes, assert_whole, make_prompts, options_for, write_prompts

from extractor.core.errors import BadAddress, ServerUnreachable, UsageError
from extractor.pipeline.run import run
from extractor.servers.client import Client, wait_until_answering
from extractor.servers.connection_errors import CERTIFICATES_VARIABLE
from extractor.servers.launcher import free_port
from extractor.testing.fake_server import FakeServer


def server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def asked(url: str, *, wait_s: float = 0.0) -> str:
    """The reason why there is no answer. Raises BadAddress if there can never be one."""
    async with Client(url, concurrency=1, request_timeout_s=5.0) as client:
        assert not await wait_until_answering([client], timeout_s=wait_s)
        with pytest.raises(ServerUnreachable) as caught:
            await client.facts()
        assert str(caught.value) == client.silence
        return client.silence


#: A wait that would exceed the time limit of a test: hopeless causes must not wait.
FOR_EVER_S = 3600.0


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """Serve a port that answers every connection with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_refused_connection_is_reported_as_no_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await asked(url) == (
        f"no server answers at {url} (cannot connect (ECONNREFUSED: Connection refused))."
    )


async def test_an_unused_proxy_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    told = await asked(f"http://127.0.0.1:{free_port()}")
    assert told.endswith(" HTTPS_PROXY is not used: connections are direct.")


async def test_an_unknown_host_name_is_not_reported_as_a_server_that_is_down() -> None:
    told = await asked("http://no-such-host.invalid:30000")
    assert told.startswith("the host name of http://no-such-host.invalid:30000 cannot be resolved")
    assert "no server answers" not in told


async def test_a_certificate_that_is_not_trusted_is_named_and_not_waited_for(
    dump_root: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeServer(dump_root).running(tls=server_side(certificate)) as server:
        assert server.url.startswith("https://")
        with pytest.raises(BadAddress, match=r"certificate is not trusted .self-signed cert") as no:
            await asked(server.url, wait_s=FOR_EVER_S)
        assert f"set {CERTIFICATES_VARIABLE}" in str(no.value)
        monkeypatch.setenv(CERTIFICATES_VARIABLE, "/nowhere.pem")
        with pytest.raises(BadAddress, match=r"names /nowhere.pem, which does not exist"):
            await asked(server.url)


async def test_plain_http_on_a_tls_port_and_the_other_way_round(
    dump_root: Path, certificate: Path
) -> None:
    async with FakeServer(dump_root).running(tls=server_side(certificate)) as server:
        plain = server.url.replace("https", "http")
        with pytest.raises(BadAddress, match=f"speaks TLS. Write the address as {server.url}"):
            await asked(plain, wait_s=FOR_EVER_S)
    async with FakeServer(dump_root).running() as server:
        with pytest.raises(BadAddress, match=r"does not speak TLS .* Write the address as http://"):
            await asked(server.url.replace("http", "https"), wait_s=FOR_EVER_S)


async def test_a_port_of_another_service_is_named() -> None:
    async with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as address:
        with pytest.raises(BadAddress, match=r"does not speak HTTP/1.1 .* another service"):
            await asked(f"http://{address}", wait_s=FOR_EVER_S)


async def test_a_server_that_closes_the_connection_may_come_up() -> None:
    async with answering(b"") as address:
        assert "closed the connection" in await asked(f"http://{address}")


async def test_too_many_open_files_are_not_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", refuse)
    with pytest.raises(UsageError, match=r"too many open files .EMFILE"):
        await asked("http://127.0.0.1:1", wait_s=FOR_EVER_S)


async def test_a_run_ends_at_once_where_one_of_its_addresses_cannot_work(
    tmp_path: Path, dump_root: Path, certificate: Path
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(2))
    async with (
        FakeServer(dump_root).running() as good,
        FakeServer(dump_root).running(tls=server_side(certificate)) as bad,
    ):
        options = options_for(
            good, path, tmp_path / "out", server_urls=(good.url, bad.url), server_wait_s=FOR_EVER_S
        )
        with pytest.raises(BadAddress, match="certificate is not trusted"):
            await run(options, Notes())
        assert good.requests == []


async def test_a_run_against_an_ipv6_address(tmp_path: Path, dump_root: Path) -> None:
    prompts = make_prompts(6)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running(host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        await run(options_for(server, path, tmp_path / "out"), Notes())
    assert_whole(tmp_path / "out", prompts)

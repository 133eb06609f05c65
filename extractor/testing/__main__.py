"""`python -m extractor.testing`: the fake server as a process."""

# ruff: noqa: E402 - our packages first
from __future__ import annotations

from extractor.core.own_packages import put_first

put_first()


import argparse
import asyncio
import os
import signal
import ssl
from pathlib import Path

from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault, FaultPlan, faults_often, no_faults
from server_patch.settings import BOOT_ID, DEFAULT_FILE_MODE


async def _serve(options: argparse.Namespace) -> None:
    plan: FaultPlan = no_faults
    if options.fault is not None:
        plan = faults_often(Fault(options.fault), every=options.fault_every, row=options.fault_row)
    server = FakeServer(
        options.dump_root,
        chunk_tokens=options.chunk_tokens,
        delay_s=options.delay_s,
        faults=plan,
        boot_id=os.environ.get(BOOT_ID),
        file_mode=options.file_mode,
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
        "--file-mode",
        type=lambda text: int(text, 8),
        default=DEFAULT_FILE_MODE,
        metavar="OCTAL",
        help="permission bits of dumps, as of `extractor serve`",
    )
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


if __name__ == "__main__":
    main()

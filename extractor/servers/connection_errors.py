"""Explains why a server cannot be reached, and whether waiting may help.

Waiting may help with a refused connection, a silent host and an unknown host name: the server may
be starting, or DNS may catch up. It does not help with an untrusted certificate or a port that
speaks another protocol.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from extractor.core.errors import ExtractorError, storage_error
from manifest.causes import LIMIT_ERRNOS, named

CERTIFICATES_VARIABLE: Final = "SSL_CERT_FILE"
_PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "all_proxy")

#: OpenSSL's reasons that are more specific than "TLS failed".
_NOT_TLS: Final = (
    "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
)  # fmt: skip
_OTHER_VERSION: Final = (
    "UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE",
    "VERSION_TOO_LOW", "UNSUPPORTED_SSL_VERSION",
)  # fmt: skip
_WANTS_CERTIFICATE: Final = (
    "TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_CERTIFICATE_REQUIRED",
    "SSLV3_ALERT_HANDSHAKE_FAILURE", "SSLV3_ALERT_BAD_CERTIFICATE",
)  # fmt: skip


def own_limit(error: BaseException) -> ExtractorError | None:
    """The error to raise if this process cannot open any connection; else None."""
    system = getattr(error, "os_error", error)
    if isinstance(system, OSError) and system.errno in LIMIT_ERRNOS:
        return storage_error(OSError(system.errno, os.strerror(system.errno)))
    return None


def detail_of(error: Exception) -> str:
    """The most specific message: of the operating system, OpenSSL or the HTTP library."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        certificate = error.certificate_error
        return getattr(certificate, "verify_message", "") or str(certificate)
    if isinstance(error, aiohttp.ClientConnectorError):
        system = error.os_error
        if isinstance(system, ssl.SSLError):
            return system.reason or str(system)
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return system.strerror or str(system)
        if system.errno is not None and system.errno > 0:
            return named(system.errno, os.strerror(system.errno))
    if isinstance(error, aiohttp.ClientResponseError):
        return " ".join(error.message.split())[:200] or type(error).__name__
    return str(error) or type(error).__name__


async def lasting_problem(url: str, error: Exception, *, tls_trial_s: float) -> str | None:
    """A permanent problem with `url` and its fix, as text; None if waiting may help.

    `tls_trial_s`: time for a handshake that shows whether a plain port speaks TLS.
    """
    detail = detail_of(error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"{url}: the server's certificate is not trusted ({detail}). {_about_certificates()}"
    if isinstance(error, aiohttp.ClientSSLError):
        return _about_tls(url, detail)
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        return f"{url} cannot be a server's address ({detail}): write it as http://HOST:PORT"
    closes = aiohttp.ServerDisconnectedError | ConnectionResetError | aiohttp.ClientResponseError
    may_be_tls = url.startswith("http://") and isinstance(error, closes)
    if may_be_tls and await _speaks_tls(url, timeout_s=tls_trial_s):
        return f"{url}: that port speaks TLS. Write the address as https://{url[7:]}"
    if isinstance(error, aiohttp.ClientResponseError) and error.status == 400:
        # The HTTP library sets this status itself when it cannot parse the reply.
        return f"{url} does not speak HTTP/1.1 ({detail}): is it the port of another service?"
    return None


def about_proxies() -> str:
    """A hint for failed connections: proxies that the environment names are not used."""
    found = [
        name
        for variable in _PROXY_VARIABLES
        for name in (variable, variable.upper())
        if os.environ.get(name)
    ]
    return f" {found[0]} is not used: connections are direct." if found else ""


def _about_certificates() -> str:
    file = os.environ.get(CERTIFICATES_VARIABLE)
    if file and not Path(file).is_file():
        return f"{CERTIFICATES_VARIABLE} names {file}, which does not exist."
    return (
        f"For a private certificate authority, set {CERTIFICATES_VARIABLE} to its certificate "
        "(PEM); name the server by a host that the certificate is for."
    )


def _about_tls(url: str, reason: str) -> str:
    if reason in _NOT_TLS:
        return f"{url}: that port does not speak TLS ({reason}). Write the address as http://…"
    if reason in _OTHER_VERSION:
        return f"{url}: the server speaks a version of TLS that is not supported here ({reason})"
    if reason in _WANTS_CERTIFICATE:
        return f"{url}: the server wants a client certificate, which cannot be given ({reason})"
    return f"{url}: TLS failed ({reason})"


async def _speaks_tls(url: str, *, timeout_s: float) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True

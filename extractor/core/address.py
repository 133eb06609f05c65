"""Server addresses: how a user may write them. Pure."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from extractor.core.errors import UsageError

DEFAULT_SERVER_URL = "http://127.0.0.1:30000"


def require_url(url: str) -> None:
    """Raise UsageError unless `url` is a server's address as we take it."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
        is_good = is_good and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # an invalid port, an unmatched bracket
        is_good = False
    if "@" in url:  # not quoted: it may hold a password
        raise UsageError(
            "--server: no user or password in the address, which is stored; set EXTRACTOR_API_KEY "
            "or name an --api-key-file"
        )
    if not is_good:
        raise UsageError(
            f"--server {url!r}: write it as http://HOST:PORT, HOST being a name, an IPv4 address, "
            "or an IPv6 address in brackets"
        )


def is_host(name: str) -> bool:
    """Whether `name` is a valid host name or IP address.

    >>> [is_host(name) for name in ("::1", "10.0.0.7", "gpu-1.lan", "256.1.1.1", "-x-", "a b", "")]
    [True, True, True, False, False, False, False]
    """
    try:
        ip_address(name)
        return True
    except ValueError:
        pass
    try:
        labels = name.encode("idna").decode().removesuffix(".").split(".")
    except UnicodeError:  # an empty or overlong label
        return False
    # A numeric last label means an IPv4 address, here an invalid one.
    return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def origin_of(url: str) -> str | None:
    """Scheme, host and port of a server's address; None for any other. Raises ValueError.

    >>> origin_of("HTTPS://me:pw@GPU-1/path"), origin_of("http://[::1]:30000"), origin_of("file:/x")
    ('https://gpu-1:443', 'http://[::1]:30000', None)
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    port = _PORTS[parts.scheme] if parts.port is None else parts.port
    return f"{parts.scheme}://{url_host(parts.hostname)}:{port}"


def url_host(name: str) -> str:
    """Format a host for a URL.

    >>> url_host("::1"), url_host("gpu-1")
    ('[::1]', 'gpu-1')
    """
    return f"[{name}]" if ":" in name else name


_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?", re.IGNORECASE)

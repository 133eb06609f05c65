"""Plain text for people: aligned columns and readable amounts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns aligned by spaces, the first to the left, the others to the right."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    """
    >>> [counted(n, "file") for n in (0, 1, 2000)]
    ['0 files', '1 file', '2,000 files']
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def amount(size_bytes: float) -> str:
    """
    >>> [amount(n) for n in (0, 1023, 1536, 5 << 30)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 GiB']
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            break
        size_bytes /= 1024
        unit = larger
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"


def rate(bytes_per_s: float) -> str:
    """In powers of ten, as the speed of disks is told.

    >>> [rate(n) for n in (0, 3.8e6, 999.9e6, 1.264e9)]
    ['0.0 MB/s', '3.8 MB/s', '999.9 MB/s', '1.26 GB/s']
    """
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"
    )


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.4, 59.6, 3599, 90061)]
    ['under a second', '1 min', '1 h 0 min', '25 h 1 min']
    """
    if seconds < 1:
        return "under a second"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def milliseconds(seconds: float) -> str:
    """
    >>> [milliseconds(s) for s in (0, 0.0004, 0.0152, 0.25, 12.34, 600)]
    ['0 ms', '0.4 ms', '15.2 ms', '250 ms', '12.3 s', '600 s']
    """
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.1f} ms" if 0 < seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def parse_bytes(text: str) -> int:
    """
    >>> [parse_bytes(t) for t in ("4096", "64M", "1.5GiB", "2 g")]
    [4096, 67108864, 1610612736, 2147483648]

    Raises ValueError.
    """
    number = text.strip().lower()
    for suffix in ("ib", "b"):
        number = number.removesuffix(suffix)
    factor = 1
    for power, letter in enumerate("kmgt", start=1):
        if number.endswith(letter):
            factor = 1024**power
            number = number[:-1]
    size = float(number) * factor
    if not 0 <= size < math.inf:
        raise ValueError(f"{text!r} is no size")
    return int(size)


def quoted(value: object) -> str:
    text = "no value" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

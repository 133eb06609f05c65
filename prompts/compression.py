"""Decompresses a file as it is read, with at most one chunk in memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from prompts.types import InputError

CHUNK_BYTES: Final = 1 << 20
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: What zstd decompresses without being asked for more; `--long=27` needs as much.
MAX_WINDOW_BYTES: Final = 1 << 27
#: Bytes of a zstd file to decompress at a time. Four bytes may expand to 128 KiB, so the pieces are
#: small, and shrink after a piece that expanded to much.
MIN_BITE_BYTES: Final = 1 << 6
MAX_BITE_BYTES: Final = 1 << 11


class _ZstdFile(io.RawIOBase):
    """Decompresses frame after frame, and tells a file that was cut off from one that ends."""

    def __init__(self, stream: io.BufferedReader[Any]) -> None:
        import zstandard

        self._stream = stream
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._frame = self._decompressor.decompressobj()
        self._is_inside = False  # a frame is begun and has not ended
        self._output = memoryview(b"")
        self._bite_bytes = MIN_BITE_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            data = self._stream.read1(self._bite_bytes)
            if not data:
                if self._is_inside:
                    raise EOFError("the last zstd frame is cut off")
                return 0
            self._output = memoryview(self._decompress(data))
            is_large = len(self._output) > CHUNK_BYTES
            bite_bytes = self._bite_bytes // 2 if is_large else self._bite_bytes * 2
            self._bite_bytes = min(max(bite_bytes, MIN_BITE_BYTES), MAX_BITE_BYTES)
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            parts.append(self._frame.decompress(data))
            self._is_inside = not self._frame.eof
            data = b""
            if self._frame.eof:
                data = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        return b"".join(parts)


def decompressed(stream: io.BufferedReader[Any], path: str) -> io.BufferedReader[Any]:
    """The stream itself, or what its gzip or zstd content decompresses to, by its first bytes."""
    start = stream.peek(4)
    if start.startswith(GZIP_MAGIC):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), CHUNK_BYTES)
    if start.startswith(ZSTD_MAGIC):
        try:
            return io.BufferedReader(_ZstdFile(stream), CHUNK_BYTES)
        except ImportError as exc:
            raise missing_extra(path, "zstd", "zstandard", exc) from exc
    return stream


@contextmanager
def explained(path: str) -> Iterator[None]:
    """What reading and decompressing raise, as an `InputError` that says what to do."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise InputError(f"{path}: damaged or cut off ({exc}): copy the file again") from exc
    except OSError as exc:
        raise InputError(
            f"{path}: cannot be read ({exc}): check the disk or copy the file"
        ) from exc
    except Exception as exc:
        if type(exc).__module__.partition(".")[0] not in ("zstandard", "pyarrow"):
            raise
        line = str(exc).strip().partition("\n")[0]
        if "too much memory" in line:
            raise InputError(
                f"{path}: its zstd window is larger than {MAX_WINDOW_BYTES >> 20} MiB: compress it "
                "again with a smaller --long, or without"
            ) from exc
        raise InputError(f"{path}: damaged or cut off ({line}): copy the file again") from exc


def missing_extra(path: str, extra: str, package: str, cause: ImportError) -> InputError:
    """The error for a file that needs a package which is not installed."""
    return InputError(
        f"{path}: needs the package {package} ({cause}). Run:\n"
        f"  pip install 'hidden-state-extractor[{extra}]'"
    )

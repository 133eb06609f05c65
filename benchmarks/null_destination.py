"""`extractor` whose shards go nowhere: what the client itself costs, without a disk.

    python -m benchmarks.null_destination run …

Everything else is done: bytes are read, hashed, checked and gathered, the manifest is written.
"""

from __future__ import annotations

import os
import sys

from extractor.__main__ import main
from extractor.system import direct_io


def _discard(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """In place of `write_at`: only the size of the file grows."""
    os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, offset + len(data)))


if __name__ == "__main__":
    vars(direct_io)["write_at"] = _discard
    sys.exit(main())

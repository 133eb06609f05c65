"""`extractor` and `python -m extractor`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """The command line. Importing it takes a second, in which Ctrl-C is to end it in order too."""
    try:
        from extractor.cli import main as command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()

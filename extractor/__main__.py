"""`extractor` and `python -m extractor`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from extractor.log_line import asks_for_objects, log_line


def main() -> NoReturn:
    """The command line. Importing it takes a second, in which Ctrl-C is to end it in order too."""
    try:
        from extractor.cli import main as command_line
    except KeyboardInterrupt:
        told = "interrupted"
        if asks_for_objects(sys.argv[1:], os.environ):
            told = log_line(told, event="error", level="error", exit_status=130)
        print(told, file=sys.stderr)
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()

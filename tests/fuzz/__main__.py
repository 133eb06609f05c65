"""`python -m fuzz [TARGET [SEED | FIRST COUNT]]`: fuzz everything, a target, or one input."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from pathlib import Path

from fuzz.campaign import faults_of
from fuzz.child import HANG_S
from fuzz.target import chance_of
from fuzz.targets import GROUPS, TARGETS, group


def main(words: list[str]) -> None:
    if len(words) == 2:
        target = TARGETS[words[0]]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            run = target.prepare(Path(scratch))
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            run(chance_of(target, int(words[1])))
        return
    named = [TARGETS[words[0]]] if words else []
    first, count = map(int, words[1:]) if len(words) == 3 else (0, None)
    faults = []
    for targets in [named] if named else map(group, GROUPS):
        seeds = {t.name: range(first, first + (count or t.count)) for t in targets}
        faults += faults_of(targets, seeds)
    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

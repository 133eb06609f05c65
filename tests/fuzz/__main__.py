"""`python -m fuzz [TARGET [SEED | FIRST COUNT]]`: fuzz everything, a target, or one input."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from pathlib import Path

from fuzz.campaign import faults_of
from fuzz.child import HANG_S
from fuzz.target import Target, chance_of
from fuzz.targets import GROUPS, group


def main(words: list[str]) -> None:
    names = [name for name in GROUPS if not words or words[0] in group(name)]
    if not names:
        sys.exit(
            f"no target is called {words[0]}: {', '.join(n for g in GROUPS for n in group(g))}"
        )
    if len(words) == 2:
        run_one(group(names[0])[words[0]], int(words[1]))
        return
    first, count = map(int, words[1:]) if len(words) == 3 else (0, None)
    faults = []
    for name in names:
        targets = [t for t in group(name).values() if not words or t.name == words[0]]
        seeds = {t.name: range(first, first + (count or t.count)) for t in targets}
        faults += faults_of(name, seeds)
    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    sys.exit(1 if faults else 0)


def run_one(target: Target, seed: int) -> None:
    """Run one input in this process, for a debugger or a traceback."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        run = target.prepare(Path(scratch))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        run(chance_of(target, seed))


if __name__ == "__main__":
    main(sys.argv[1:])

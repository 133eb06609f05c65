"""`python -m faults [CASE]`: plays the matrix, or the cases whose name begins so, and prints it."""

from __future__ import annotations

import argparse
import os
import sys

from faults.cases import all_cases
from faults.matrix import as_table, play_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("case", nargs="?", default="", help="name of a case, or how it begins")
    parser.add_argument("--main", action="store_true", help="only what `make test-all` runs")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if case.name.startswith(options.case) and (case.is_main or not options.main)
    ]
    if options.list:
        print("\n".join(case.name for case in cases))
        return
    if not cases:
        sys.exit(f"no case begins with {options.case!r}; --list names them")
    outcomes = []
    for outcome in play_all(cases, num_jobs=options.jobs):
        outcomes.append(outcome)
        if outcome.problem and not outcome.is_skipped:
            print(f"FAILED {outcome.name}\n{outcome.problem}", file=sys.stderr, flush=True)
        elif sys.stderr.isatty():
            print(f"\r{len(outcomes)}/{len(cases)}", end="", file=sys.stderr, flush=True)
    failed = [outcome for outcome in outcomes if outcome.problem and not outcome.is_skipped]
    skipped = [outcome for outcome in outcomes if outcome.is_skipped]
    print(as_table(outcomes))
    print(f"{len(outcomes)} cases, {len(failed)} failed, {len(skipped)} not possible here")
    for outcome in failed:
        print(f"  make faults CASE={outcome.name}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Tries every tiny architecture on a real server, and keeps what came of it for docs/models.md.

    PYTHONPATH=tests python -m plugin.architectures [NAME ...]

Each name takes half a minute: a model with random float32 weights, a server on this machine's CPU
with the plugin, one prompt in chunks of 32 tokens, and Hugging Face's states of the same prompt.
What is found replaces the name's entry in tests/plugin/architectures.json, and the table in
docs/models.md is written anew; the continuous tests compare the two.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rig.architectures import ARCHITECTURES
from rig.models import TINY_CONFIGS, tiny
from rig.server import ServerDied

from plugin.reference import Reference, relative_error
from plugin.serving import Serving, serve
from server_patch.dump_format import FAILED_NAME

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: The table stands behind this line of the page.
MARK = "<!-- written by tests/plugin/architectures.py -->"
BOUNDARIES = (0, 1, 4, 7)
ROWS = 75
#: Relative, float32. Kernels and batches differ by less; another layer's states by tenths.
TOLERANCE = 1e-5
FAR = 1e-3

#: Where SGLang computes something else than Hugging Face, so that the states differ by more.
DEVIATIONS = {
    "apertus": "SGLang keeps the parameters of the xIELU activation in bfloat16",
    "gemma": "SGLang takes the exact GELU, Hugging Face its tanh approximation",
}

CONFIGS: Mapping[str, dict[str, Any]] = {**TINY_CONFIGS, **ARCHITECTURES}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one architecture."""

    architecture: str
    engine: str  # version of SGLang
    how: str  # what captured the states; "refused", or "not served" where the server did not start
    error: float | None = None  # largest relative difference from Hugging Face, over all states
    reason: str | None = None  # why not


def try_out(
    name: str, scratch: Path, *, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Outcome:
    """Start a server for the tiny model `name`, and compare its dumps. Raises AssertionError.

    args, env: of the server, besides the chunk size.
    """
    import sglang.version

    architecture, engine = CONFIGS[name]["architectures"][0], sglang.version.__version__
    model = tiny(name, scratch / name, CONFIGS[name])
    root = scratch / f"{name}-dumps"
    try:
        with serve(
            model,
            root,
            boundaries=",".join(map(str, BOUNDARIES)),
            last="both",
            args=("--chunked-prefill-size", "32", *args),
            env=env,
        ) as server:
            (directory,) = server.directories
            failed = directory / FAILED_NAME
            if failed.exists():
                reason = json.loads(failed.read_bytes())["reason"]
                return Outcome(
                    architecture=architecture, engine=engine, how="refused", reason=reason
                )
            (ready,) = server.readies()
            assert ready.capture.boundaries == BOUNDARIES
            return Outcome(
                architecture=ready.model.architecture,
                engine=ready.engine.version,
                how=ready.capture.method,
                error=largest_error(server, Reference(model)),
            )
    except ServerDied as error:
        return Outcome(
            architecture=architecture,
            engine=engine,
            how="not served",
            reason=last_words(str(error)),
        )


def last_words(log: str) -> str:
    """The error that ended a server, and where in SGLang it was raised if it does not say more."""
    place = ""
    words = log.splitlines()[-1]
    for line in log.splitlines():
        if found := re.search(r'sglang/(\S+)", line \d+, in (\S+)', line):
            place = f"{found[2]} of {found[1]}"
        elif re.match(r"\w+(Error|Exception)\b", line):
            words = line if ":" in line else f"{line} in {place}"
    return words[:200]


def largest_error(server: Serving, reference: Reference) -> float:
    """The largest relative difference from Hugging Face, over all states of one prompt."""
    generator = random.Random(1)
    ids = [generator.randrange(3, 500) for _ in range(ROWS)]
    server.generate("xtr-values", ids)
    sample = server.take_sample("xtr-values", ROWS)
    assert sample["input_ids"].tolist() == ids
    truth = reference.states(ids)
    hidden = sample["last"].shape[1]
    errors = [
        relative_error(sample["last"], truth.last),
        relative_error(sample["last_pre"], truth.last_pre),
    ]
    every = [*truth.boundaries, truth.last_pre]
    for index, boundary in enumerate(BOUNDARIES):
        state = sample["aux"][:, index * hidden : (index + 1) * hidden]
        errors.append(relative_error(state, every[boundary]))
        for neighbour in {max(boundary - 1, 0), boundary + 1} - {boundary}:
            assert relative_error(state, every[neighbour]) > FAR
    return max(errors)


def read_results() -> dict[str, Outcome]:
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: Outcome(**entry) for name, entry in document.items()}


def table(results: Mapping[str, Outcome]) -> str:
    """The table of docs/models.md."""
    lines = [
        "| architecture | captured by | SGLang | largest relative difference |",
        "|---|---|---|---|",
    ]
    for name, outcome in sorted(results.items(), key=lambda item: item[1].architecture):
        found = outcome.reason
        if outcome.error is not None:
            found = f"{outcome.error:.1e}" if outcome.error else "0, bit for bit"
        if outcome.error is not None and name in DEVIATIONS:
            found = f"{found}: {DEVIATIONS[name]}"
        lines.append(f"| `{outcome.architecture}` | {outcome.how} | {outcome.engine} | {found} |")
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(CONFIGS))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(CONFIGS))}")
    for name in names or sorted(CONFIGS):
        with tempfile.TemporaryDirectory(prefix="try-") as scratch:
            outcome = try_out(name, Path(scratch))
        print(f"{name}: {outcome}", flush=True)
        results = {**read_results(), name: outcome}
        text = json.dumps({key: asdict(results[key]) for key in sorted(results)}, indent=1)
        RESULTS.write_text(text + "\n")
        if PAGE.exists():
            above, mark, _ = PAGE.read_text().partition(MARK)
            assert mark, f"{PAGE} has no line {MARK}"
            PAGE.write_text(f"{above}{MARK}\n\n{table(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])

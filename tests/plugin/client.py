"""The real client against a server of these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from helpers import Ids, Notes, read_samples, run_options

from extractor.pipeline.run import run
from extractor.pipeline.summary import RunSummary
from plugin.reference import Reference
from plugin.serving import Serving
from plugin.values import assert_is


def extract(server: Serving, prompts: Path, out: Path, **options: Any) -> RunSummary:
    """`extractor run` on rows of ids."""
    return asyncio.run(
        run(
            run_options(
                prompts=(prompts,),
                out=out,
                server_urls=(server.url,),
                dump_root=server.root,
                tokenizer="none",
                **options,
            ),
            Notes(),
        )
    )


def assert_stored(
    out: Path, prompts: Sequence[Ids], boundaries: Sequence[int], reference: Reference
) -> None:
    """`out` holds every prompt with its own states."""
    samples = read_samples(out)
    assert set(samples) == set(range(len(prompts)))
    for ordinal, sample in samples.items():
        ids = prompts[ordinal].ids
        states = {**sample.states, "input_ids": np.array(sample.ids)}
        assert_is(states, ids, boundaries, reference.states(ids))

"""Prompt files in the formats that pyarrow reads, whose faults may kill the process."""

from __future__ import annotations

import prompt_files

from fuzz.prompt_targets import of_format, prepare_saved
from fuzz.target import Target

TARGETS = [
    Target(name="parquet", count=900, prepare=of_format(prompt_files.as_parquet)),
    Target(
        name="arrow",
        count=900,
        prepare=of_format(prompt_files.as_arrow_stream, prompt_files.as_arrow_file),
    ),
    Target(name="saved", count=500, prepare=prepare_saved),
]

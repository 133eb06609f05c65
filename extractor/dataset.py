"""`dataset.json`: where a data set comes from. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from extractor import __version__
from extractor.config import Identity
from extractor.shard_format import SHARD_FORMAT_VERSION


def dataset_document(identity: Identity, *, engine_version: str) -> bytes:
    """Provenance as JSON; layer numbers in both conventions, so that nobody has to guess.

    `boundaries`: index b is the residual stream entering layer b (Hugging Face `hidden_states[b]`).
    `layer_outputs`: the same states as outputs of layers, b - 1 (SpecForge, TorchSpec and others).
    """
    document: dict[str, Any] = {
        "format": "hidden-state-extractor",
        "format_version": SHARD_FORMAT_VERSION,
        "tool_version": __version__,
        "engine": "sglang",
        "engine_version": engine_version,
        "model": identity.model,
        "architecture": identity.architecture,
        "config_digest": identity.config_digest,
        "quantization": identity.quantization,
        "num_layers": identity.num_layers,
        "hidden_size": identity.hidden_size,
        "vocab_size": identity.vocab_size,
        "dtype": identity.dtype,
        "boundaries": list(identity.boundaries),
        "layer_outputs": [boundary - 1 for boundary in identity.boundaries],
        "last_kind": identity.last_kind,
        "tokenizer_digest": identity.tokenizer_digest,
        "template_digest": identity.template_digest,
        "reading": dict(identity.reading),
        "inputs": list(identity.inputs),
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)

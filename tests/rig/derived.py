"""Models made of a tiny model's weights: under a multimodal wrapper, and quantised.

Each folder holds what SGLang serves, and in `reference/` the plain text model of the same weights,
as Hugging Face loads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .models import publish, tiny

REFERENCE = "reference"
_WEIGHTS = "model.safetensors"


def kimi_k25(target: Path) -> Path:
    """Make Kimi-K2.5's wrapper around the tiny DeepSeek-V3 in `target`; return `target`.

    It has a vision tower, small, whose weights are not in the file: no image is ever shown to it.
    """
    vision = {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "vt_hidden_size": 32,
        "mm_hidden_size": 32,
        "intermediate_size": 64,
        "text_hidden_size": 64,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
    }

    def build(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        text = tiny("deepseek-v3", folder / REFERENCE)
        weights = load_file(text / _WEIGHTS)
        save_file(
            {f"language_model.{name}": weight for name, weight in weights.items()},
            folder / _WEIGHTS,
            metadata={"format": "pt"},
        )
        _write_config(
            folder,
            {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "model_type": "kimi_k25",
                "torch_dtype": "float32",
                "media_placeholder_token_id": 511,  # beyond what the tests send
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "text_config": _read_config(text),
                "vision_config": vision,
            },
        )

    return publish(target, {"kind": "kimi-k25", "version": 1, "vision": vision}, build)


def llama_int8(target: Path) -> Path:
    """Make the tiny Llama with int8 weights, one scale per output channel, in `target`; return it.

    Its reference has the weights that these stand for: what is compared is the engine's way with
    quantised weights, not the loss of quantising.
    """

    def build(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        reference = tiny("llama", folder / REFERENCE)
        weights = load_file(reference / _WEIGHTS)
        quantised: dict[str, Any] = {}
        for name, weight in weights.items():
            if not name.endswith("proj.weight"):
                quantised[name] = weight
                continue
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            quantised[name] = (weight / scale).round().to(torch.int8)
            quantised[f"{name}_scale"] = scale
            weights[name] = quantised[name].float() * scale
        save_file(quantised, folder / _WEIGHTS, metadata={"format": "pt"})
        save_file(weights, reference / _WEIGHTS, metadata={"format": "pt"})
        config = _read_config(reference)
        _write_config(folder, {**config, "quantization_config": {"quant_method": "w8a8_int8"}})

    return publish(target, {"kind": "llama-int8", "version": 1}, build)


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

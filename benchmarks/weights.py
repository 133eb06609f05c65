"""A model folder with seeded random weights from a bare config.json, for comparing values.

    python -m benchmarks.weights CONFIG_DIR TARGET_DIR

Weights as a trained model's would be no smaller: each layer changes the residual stream visibly,
so that a wrong layer or row cannot look almost right. (SGLang's `--load-format dummy` weights are
too small for that.)
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.command import command_parser, directory, run_command


def make_weights(config: Path, target: Path, *, seed: int = 0) -> None:
    """Write bfloat16 weights for `config`/config.json to `target`; nothing if they are there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (target / "done").exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=torch.bfloat16
        )
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.8, 1.2, generator=generator)
            else:
                scale = 0.5 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, scale, generator=generator)
    model.save_pretrained(target, max_shard_size="4GB")
    shutil.copy(config / "config.json", target / "config.json")
    (target / "done").touch()


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument("config", type=directory, help="a folder with a config.json")
    parser.add_argument("target", type=Path, help="where the model folder is made")
    options = parser.parse_args()
    make_weights(options.config, options.target)


if __name__ == "__main__":
    run_command(main)

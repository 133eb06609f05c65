"""Measures the speed and the extra memory of the weight fingerprint.

    python -m benchmarks.weight_fingerprint [--device cuda] [--gigabytes 60]

Creates tensors of random bytes, large ones (`--tensor-megabytes`) and as many small ones, and
computes their fingerprint as the plugin does at load. The baseline, in the same run, is torch's
fastest pass over the same bytes: the sum of each tensor as 64-bit integers. Rounds are interleaved.
Prints the medians as JSON, and on a GPU the peak of the extra memory that the fingerprint used.

Exit status 1 if the fingerprint differs between rounds, or does not change with one bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.command import Failed, command_parser, number_from, run_command
from server_patch.fingerprint import fingerprint


def make_model(*, size_bytes: int, tensor_bytes: int, device: str) -> torch.nn.Module:
    """A model of random bytes: large tensors, each with a small one, like a norm's weight."""
    model = torch.nn.Module()
    generator = torch.Generator(device).manual_seed(0)
    left = size_bytes
    number = 0
    while left > 0:
        for kind, most in (("weight", tensor_bytes), ("norm", 16384)):
            count = min(left, most) // 8 * 8
            if count == 0:
                return model
            data = torch.empty(count, dtype=torch.uint8, device=device)
            data.view(torch.int64).random_(generator=generator)
            model.register_buffer(f"{kind}_{number}", data.view(torch.bfloat16))
            left -= count
        number += 1
    return model


def timed(work: Callable[[], object], device: str) -> tuple[float, int]:
    """Run `work`; return its seconds and the peak of allocated bytes (0 on the CPU)."""
    on_gpu = torch.device(device).type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return seconds, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def sum_all(model: torch.nn.Module) -> int:
    """The baseline: read every byte once and only sum."""
    sums = [buffer.view(torch.int64).sum() for buffer in model.buffers()]
    return int(torch.stack(sums).sum())


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights")
    parser.add_argument(
        "--tensor-megabytes", type=float, default=256.0, help="size of each large tensor"
    )
    parser.add_argument("--rounds", type=number_from(1), default=5, help="after one to warm up")
    options = parser.parse_args()
    size_bytes = int(options.gigabytes * 1e9)
    model = make_model(
        size_bytes=size_bytes,
        tensor_bytes=int(options.tensor_megabytes * 1e6),
        device=options.device,
    )
    size_bytes = sum(buffer.nbytes for buffer in model.buffers())
    values = set()
    ours, baseline, peaks = [], [], []
    for number in range(options.rounds + 1):
        seconds, peak = timed(lambda: values.add(fingerprint(model).content), options.device)
        base_s, _ = timed(lambda: sum_all(model), options.device)
        if number:
            ours.append(seconds)
            baseline.append(base_s)
            peaks.append(peak)
    with torch.no_grad():
        next(model.buffers()).view(torch.uint8)[-1].bitwise_xor_(1)
    if len(values) != 1 or fingerprint(model).content in values:
        raise Failed(f"wrong fingerprints: {values}")
    median_s, base_median_s = statistics.median(ours), statistics.median(baseline)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if "cuda" in options.device else "cpu",
                "torch": torch.__version__,
                "gigabytes": size_bytes / 1e9,
                "tensors": len(list(model.buffers())),
                "fingerprint_s": round(median_s, 4),
                "fingerprint_gb_per_s": round(size_bytes / median_s / 1e9, 1),
                "sum_s": round(base_median_s, 4),
                "sum_gb_per_s": round(size_bytes / base_median_s / 1e9, 1),
                "ratio": round(base_median_s / median_s, 3),
                "peak_extra_mb": round(max(peaks) / 1e6, 1),
                "fingerprint_s_by_round": [round(seconds, 4) for seconds in ours],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    run_command(main)

"""Makes SGLang's w8a8_int8 linear layers run on the CPU: an SGLang plugin for the tests' servers.

Their product is a GPU kernel. Weights are int8 with a scale per output channel, as the engine loads
them; activations are left as they are (a scale of one), because rounding them would make results
depend on the last bit, and the comparison with Hugging Face could not be strict.
"""

from __future__ import annotations

from typing import Any


def hooks() -> None:
    import torch
    from sglang.srt.layers.quantization import w8a8_int8

    def per_token_quant_int8(x: Any) -> tuple[Any, Any]:
        return x, x.new_ones((*x.shape[:-1], 1))

    def int8_scaled_mm(
        x: Any, weight: Any, x_scale: Any, weight_scale: Any, *, out_dtype: Any, bias: Any
    ) -> Any:
        product = (x @ weight.to(x.dtype)) * x_scale * weight_scale.reshape(1, -1)
        return (product if bias is None else product + bias).to(out_dtype)

    w8a8_int8.per_token_quant_int8 = per_token_quant_int8
    w8a8_int8.int8_scaled_mm = int8_scaled_mm
    w8a8_int8.W8A8Int8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])

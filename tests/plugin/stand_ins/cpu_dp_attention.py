"""Makes SGLang 0.5.23's DP attention run on the CPU: an SGLang plugin for the tests' servers.

Its collectives are wired to GPU kernels, and the torch_native attention backend says nothing of
the padding that DP attention needs. Gloo has the collectives; what is padded, relabelled and
gathered stays the engine's own.
"""

from __future__ import annotations

from typing import Any


def hooks() -> None:
    import torch.distributed as dist
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    def all_gather_into_tensor(self: Any, output: Any, part: Any) -> None:
        dist.all_gather_into_tensor(output, part, group=self.device_group)

    def reduce_scatter_tensor(self: Any, output: Any, whole: Any) -> Any:
        total = whole.clone()
        dist.all_reduce(total, group=self.device_group)
        rows = output.shape[0]
        output.copy_(total[self.rank_in_group * rows : (self.rank_in_group + 1) * rows])
        return output

    GroupCoordinator.all_gather_into_tensor = all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = reduce_scatter_tensor
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = True  # the rig's platform is not "cpu" to the engine
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1

"""Stand-ins for the CUDA calls that megatron-core makes, so that its models train on CPU ranks over Gloo."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a CUDA device are made on the CPU, and name their type as one on the device."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def install() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as mixtures
    import megatron.core.transformer.multi_latent_attention as latent

    latent.HAVE_TE = False  # true without Transformer Engine, too
    vars(mixtures).setdefault("te_general_gemm", None)  # not defined without Transformer Engine
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.get_rng_state = torch.get_rng_state
    cuda.manual_seed = torch.manual_seed
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    OnCpu().__enter__()

"""`deepspeed.ops.adam` and the like: the optimizers that scripts import, with torch's implementations."""

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.compat.deepspeed.errors import CallError


class _Adam(torch.optim.Adam):
    """torch's Adam with the options and defaults of DeepSpeed's. `decoupled`: the weight decay is that of AdamW."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        decoupled: bool, bias_correction: bool, amsgrad: bool,
    ) -> None:  # fmt: skip
        if not bias_correction:
            raise CallError(f"{type(self).__name__}(bias_correction=False) is not offered: leave it out")
        super().__init__(
            params,
            lr=lr,
            betas=(float(betas[0]), float(betas[1])),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=decoupled,
        )


class FusedAdam(_Adam):
    """In the place of DeepSpeed's FusedAdam."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode, bias_correction, amsgrad)


class DeepSpeedCPUAdam(_Adam):
    """In the place of DeepSpeed's DeepSpeedCPUAdam."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction, amsgrad)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """In the place of DeepSpeed's DeepSpeedCPUAdagrad."""


def refused_optimizer(name: str) -> Any:
    """Returns a class of this name that cannot be made, because torch has no such optimizer."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CallError(f"{name} is not offered, because torch has no such optimizer: use torch.optim.AdamW")

    return type(name, (), {"__new__": refuse})


FusedLamb = refused_optimizer("FusedLamb")
FusedLion = refused_optimizer("FusedLion")
DeepSpeedCPULion = refused_optimizer("DeepSpeedCPULion")
ZenFlowCPUAdam = refused_optimizer("ZenFlowCPUAdam")

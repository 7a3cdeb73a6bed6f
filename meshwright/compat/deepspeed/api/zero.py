"""`deepspeed.zero`: contexts in which models are built, and in which scripts look at whole weights."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.compat.deepspeed.errors import CallError


class Init:
    """The context in which DeepSpeed divides parameters as they are made. Here they are made whole, in CPU memory, and
    `initialize` divides them."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: Any = None,
        mpu: Any = None,
        **_: Any,
    ) -> None:
        self._device = torch.device("cpu") if enabled else None

    def __enter__(self) -> "Init":
        if self._device is not None:
            self._device.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*error)


class GatheredParameters:
    """Within this context the parameters are whole on every rank. With `modifier_rank`, what that rank has written into
    them is afterwards on all ranks; otherwise changes are lost. All ranks enter it together."""

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = params if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
        self._parameters = [parameter for parameter in given if isinstance(parameter, Tensor)] if enabled else []
        self._modifier_rank = modifier_rank
        self._whole: list[tuple[Tensor, Tensor]] = []  # the parameter, and what its object was before

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if not isinstance(parameter, DTensor):
                continue
            with torch.no_grad():
                whole = nn.Parameter(parameter.full_tensor().clone(), parameter.requires_grad)
            try:
                torch.utils.swap_tensors(parameter, whole)  # whoever holds the parameter sees the whole one
            except RuntimeError as error:
                raise CallError(
                    f"GatheredParameters: a parameter of shape {tuple(parameter.shape)} is in use by a graph of a"
                    f" forward pass ({error}): enter the context after backward and step"
                ) from None
            self._whole.append((parameter, whole))

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        if self._modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in self._parameters:
                dist.broadcast(parameter.data, self._modifier_rank)
        for parameter, shard in self._whole:
            torch.utils.swap_tensors(parameter, shard)
            if self._modifier_rank is not None:
                assert isinstance(parameter, DTensor)
                value = distribute_tensor(shard.data, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(value.to_local())
        self._whole = []


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a block that uses the parameter of another one gathers it by itself."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Any) -> list[nn.Module]:
    """Does nothing: blocks whose parts run conditionally are found by themselves. Returns no modules."""
    return []


class ZeroParamStatus:
    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3

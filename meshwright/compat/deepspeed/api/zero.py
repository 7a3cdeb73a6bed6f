"""`deepspeed.zero`: contexts in which models are built, and in which scripts look at whole weights."""

from collections.abc import Iterable
from typing import Any, cast
from weakref import WeakSet

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


_TRAINED: WeakSet[nn.Module] = WeakSet()  # the models of engines, in which `GatheredParameters` looks for parameters


def note_model(model: nn.Module) -> None:
    """Lets `GatheredParameters` find the parameters of a model."""
    _TRAINED.add(model)


class GatheredParameters:
    """Within this context the modules have these parameters whole, on every rank: read and write them as attributes of
    their modules. With `modifier_rank`, what that rank has written is afterwards on all ranks; otherwise changes are
    lost. No forward pass may run in it. All ranks enter it together."""

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
        self._whole: list[tuple[nn.Module, str, DTensor, nn.Parameter]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        wanted = {id(parameter): parameter for parameter in self._parameters if isinstance(parameter, DTensor)}
        if not wanted:
            return
        gathered: dict[int, nn.Parameter] = {}
        for module in (module for model in tuple(_TRAINED) for module in model.modules()):
            for name, parameter in module._parameters.items():
                if id(parameter) not in wanted:
                    continue
                shard = wanted[id(parameter)]
                if id(shard) not in gathered:
                    gathered[id(shard)] = nn.Parameter(shard.full_tensor().clone(), shard.requires_grad)
                self._whole.append((module, name, shard, gathered[id(shard)]))
        for module, name, _, whole in self._whole:
            module._parameters[name] = whole
        if len(gathered) < len(wanted):
            raise CallError(
                "GatheredParameters: a parameter belongs to no model of an engine: give parameters of engine.module"
            )

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        plain = [parameter for parameter in self._parameters if not isinstance(parameter, DTensor)]
        modified = self._modifier_rank is not None
        if modified and dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in (*plain, *{id(whole): whole for _, _, _, whole in self._whole}.values()):
                dist.broadcast(tensor.data, self._modifier_rank)
        for module, name, shard, whole in self._whole:
            module._parameters[name] = cast(nn.Parameter, shard)
            if modified:
                value = distribute_tensor(whole.data, shard.device_mesh, shard.placements, src_data_rank=None)
                shard.to_local().copy_(value.to_local())
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

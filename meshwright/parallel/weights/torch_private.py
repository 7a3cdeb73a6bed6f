"""The private interfaces of FSDP2 that shards in proportion need (proportional_shards.py); all others are in
parallel/torch_private.py. They are the same in torch 2.11 and 2.13.

FSDP2 gives each rank of n equally many rows of a weight, and keeps its shard padded to the size of the largest one.
Here a rank keeps its own rows only. They are padded to the largest shard where FSDP2 exchanges them:

    all-gather        each rank sends its shard, padded (`_sharded_param_data`); the shards of all ranks without the
                      padding are then the gathered weight (`init_unsharded_param`)
    reduce-scatter    each rank's rows of the gradient are padded (`_get_grad_inner_tensor`); of what a rank gets, it
                      copies its own rows, so that the padding can be freed (`to_sharded_dtensor`)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard
from torch.nn.functional import pad

from meshwright.errors import InputError
from meshwright.parallel.weights.proportional_shards import rows_of_ranks

_OVERRIDDEN = (
    *("_sharded_param_data", "init_all_gather_outputs", "init_unsharded_param", "_get_grad_inner_tensor"),
    *("to_sharded_dtensor", "sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size"),
    *("_setattr_on_modules", "fsdp_placement", "all_gather_outputs", "_orig_size", "sharded_param"),
)


def divide_in_proportion(parameters: list[Any], wholes: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    """Makes FSDP2's records (`FSDPParam`) of the parameters of a module that was just sharded hold the rows that their
    mesh gives to this rank. `wholes` are the weights as they were before, by module and name."""
    for parameter in parameters:
        _check(parameter)
        module_info = parameter._module_info
        parameter.__class__ = _ProportionalParameter
        parameter.hold_rows_of(wholes[module_info.module, module_info.param_name].detach())


def _check(parameter: Any) -> None:
    """Raises an `InputError` if this version of torch has another FSDP2 than the one that this file changes."""
    missing = [name for name in _OVERRIDDEN if not hasattr(parameter, name)]
    if type(parameter) is not _fsdp_param.FSDPParam or missing:
        reason = f"has no {missing[0]}" if missing else f"is a {type(parameter).__name__}"
        raise InputError(
            f"plan.shares.shards changes how FSDP2 divides weights, but FSDPParam of torch {torch.__version__}"
            f" {reason}: leave shares.shards out, or use torch 2.11 or 2.13"
        )
    assert parameter.fsdp_placement == Shard(0)


class _ProportionalParameter(_fsdp_param.FSDPParam):
    """A weight of which the ranks hold different numbers of rows."""

    _own_rows: Tensor  # 1-dimensional; the memory of this rank's shard
    _gathered: Tensor | None  # 1-dimensional; the memory of the gathered weight
    _rows: tuple[int, ...]  # by rank

    def hold_rows_of(self, whole: Tensor) -> None:
        del self.__dict__["_sharded_param_data"]  # FSDP2's own shard
        mesh: Any = self.mesh_info.mesh
        axis = mesh.ndim - 1
        self._rows, rank = rows_of_ranks(whole.shape[0], mesh, axis), mesh.get_local_rank(axis)
        self._gathered = None
        local = whole.narrow(0, sum(self._rows[:rank]), self._rows[rank]).clone()
        self.sharded_size = local.size()
        self.contiguous_sharded_stride = local.stride()
        self.padded_sharded_param_size = local.size()  # FSDP2 pads a shard of another size when it is loaded
        self._own_rows = local.view(-1)
        requires_grad = self.sharded_param.requires_grad
        self.sharded_param = nn.Parameter(super().to_sharded_dtensor(local), requires_grad=requires_grad)
        self._setattr_on_modules(self.sharded_param)

    @property
    def _row_elements(self) -> int:
        return self._orig_size[1:].numel()

    @property
    def _sharded_param_data(self) -> Tensor:
        """What this rank sends in an all-gather."""
        padding = max(self._rows) * self._row_elements - self._own_rows.numel()
        return pad(self._own_rows, (0, padding)) if padding else self._own_rows

    @_sharded_param_data.setter
    def _sharded_param_data(self, data: Tensor) -> None:
        self._own_rows = data

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **options: Any,  # torch 2.11 has one more
    ) -> None:
        """Allocates the memory into which FSDP2 copies the padded shards of all ranks."""
        self.all_gather_outputs = [
            torch.empty(numel * world_size, dtype=dtype, device=device)
            for numel, dtype in zip(all_gather_input_numels, all_gather_input_dtypes, strict=True)
        ]

    @torch.no_grad()
    def init_unsharded_param(self) -> None:
        """Copies the shards of all ranks, without their padding, into the memory of the gathered weight, which then
        takes the place of the padded memory."""
        (padded,) = self.all_gather_outputs
        of_ranks = padded.view(len(self._rows), -1)
        shards = [of_ranks[rank, : rows * self._row_elements] for rank, rows in enumerate(self._rows)]
        if self._gathered is None:
            self._gathered = torch.cat(shards)
        else:
            _fsdp_param.alloc_storage(self._gathered)
            if self._gathered.is_inference():
                torch.cat(shards, out=self._gathered)
            else:
                # Autograd may have saved the weight of an earlier gathering, whose memory was freed in between.
                with torch.autograd._unsafe_preserve_version_counter(self._gathered):
                    torch.cat(shards, out=self._gathered)
        self.all_gather_outputs = [self._gathered]
        super().init_unsharded_param()

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        """The gradient of the whole weight with each rank's rows padded to those of the largest shard."""
        whole = super()._get_grad_inner_tensor(grad)
        most = max(self._rows)
        padded = whole.new_zeros(len(self._rows), most, *whole.shape[1:])
        for of_rank, rows in zip(padded, whole.split(self._rows), strict=True):
            of_rank[: len(rows)].copy_(rows)
        return padded.flatten(0, 1)

    def to_sharded_dtensor(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        """This rank's rows of a reduced gradient, in memory of their own: FSDP2 has a view of the memory of a whole
        unit with its padding."""
        return super().to_sharded_dtensor(tensor.clone(), *args, **options)

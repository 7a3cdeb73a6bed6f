"""Writes and reads divided tensors as chunks of the whole tensor, so that a checkpoint does not depend on the plan.

`ChunkedTensor` implements the protocol of DCP (torch.distributed.checkpoint) for objects that describe their own
chunks. Each region of the whole tensor that a rank holds is one chunk. If several ranks hold the same chunk, only one
of them writes it: DCP removes duplicates and distributes the chunks over the ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import ParameterLayout, local_tensor, region_view, shard_regions, whole_shape


class ChunkedTensor:
    """Describes this rank's part of a divided tensor to DCP. The tensor, replicate or shard axis divides it among
    ranks."""

    def __init__(self, tensor: Tensor, layout: ParameterLayout | None) -> None:
        self.tensor = tensor
        self._size = torch.Size(whole_shape(tensor, layout))
        self._regions = {torch.Size(region.offsets): region for region in shard_regions(tensor, layout)}

    def size(self) -> torch.Size:
        """The size of the whole tensor."""
        return self._size

    def view(self, offsets: torch.Size) -> Tensor:
        """A view of this rank's memory of the chunk that begins at `offsets` in the whole tensor."""
        return region_view(local_tensor(self.tensor.detach()), self._regions[offsets])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, torch.Size(region.sizes)) for offsets, region in self._regions.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self.tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._size),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """DCP's default planner, which can also save `ChunkedTensor` objects. It does not flatten the state dict, because
    its keys are flat already, and DCP would turn the keys of nested small objects into strings."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _chunk(self.state_dict, index) if _is_chunked(self.state_dict, index) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, which can also load into `ChunkedTensor` objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        chunked = {key: value for key, value in state_dict.items() if isinstance(value, ChunkedTensor)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # DCP has dropped the `ChunkedTensor` objects, because it does not know their type. They are read in place.
        self.state_dict.update(chunked)
        state_dict.update(chunked)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _chunk(self.state_dict, index) if _is_chunked(self.state_dict, index) else super().lookup_tensor(index)


def as_chunked(value: Any, layout: ParameterLayout | None) -> Any:
    """Returns a `ChunkedTensor` for a tensor that is divided among ranks, and any other value unchanged."""
    is_divided = isinstance(value, Tensor) and (layout is not None or isinstance(value, DTensor))
    return ChunkedTensor(value, layout) if is_divided else value


def local_value(value: Any) -> Any:
    """The inverse of `as_chunked`: returns the tensor with this rank's memory for a `ChunkedTensor`, and any other
    value unchanged."""
    return value.tensor if isinstance(value, ChunkedTensor) else value


def _is_chunked(state: dict[str, Any], index: MetadataIndex) -> bool:
    return isinstance(state.get(index.fqn), ChunkedTensor)


def _chunk(state: dict[str, Any], index: MetadataIndex) -> Tensor:
    tensor = state[index.fqn]
    assert isinstance(tensor, ChunkedTensor)
    assert index.offset is not None
    return tensor.view(index.offset)

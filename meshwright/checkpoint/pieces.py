"""Tensors of which a rank holds a part: written and read as chunks of the whole, so that no plan shows in a checkpoint.

`Pieces` speaks DCP's protocol for tensors that know their own chunks; each rectangle of the whole is one. A rectangle
that several ranks hold is written by one of them: DCP leaves out equal chunks and spreads the rest over the ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import Layout, local_of, rectangles, view_of, whole_shape


class Pieces:
    """A tensor that the tensor, replicate or shard axis divides."""

    def __init__(self, tensor: Tensor, layout: Layout | None) -> None:
        self.tensor = tensor
        self._size = torch.Size(whole_shape(tensor, layout))
        self._found = {torch.Size(found.offsets): found for found in rectangles(tensor, layout)}

    def size(self) -> torch.Size:
        return self._size

    def view(self, offsets: torch.Size) -> Tensor:
        return view_of(local_of(self.tensor.detach()), self._found[offsets])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, torch.Size(found.sizes)) for offsets, found in self._found.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_of(self.tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._size),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """The keys are flat already, and flattening turns the keys of small objects into words."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _piece(self.state_dict, index) if _is_piece(self.state_dict, index) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        divided = {key: value for key, value in state_dict.items() if isinstance(value, Pieces)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict.update(divided)  # DCP forgets objects of kinds it does not know, since it replaces them
        state_dict.update(divided)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _piece(self.state_dict, index) if _is_piece(self.state_dict, index) else super().lookup_tensor(index)


def pieces(value: Any, layout: Layout | None) -> Any:
    """What DCP is given for a tensor; whole ones and other objects as they are."""
    divided = isinstance(value, Tensor) and (layout is not None or isinstance(value, DTensor))
    return Pieces(value, layout) if divided else value


def held(value: Any) -> Any:
    """What this rank holds: the inverse of `pieces`."""
    return value.tensor if isinstance(value, Pieces) else value


def _is_piece(state: dict[str, Any], index: MetadataIndex) -> bool:
    return isinstance(state.get(index.fqn), Pieces)


def _piece(state: dict[str, Any], index: MetadataIndex) -> Tensor:
    found = state[index.fqn]
    assert isinstance(found, Pieces)
    assert index.offset is not None
    return found.view(index.offset)

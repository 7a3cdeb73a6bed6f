"""What the allocator, the matrix library and the driver of a kind of device add to the memory of tensors."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from meshwright.cluster.cluster import DeviceKind

MIB = 2**20
_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc of c10/cuda/CUDACachingAllocator.cpp
_SMALLEST_REMAINDER_BYTES = MIB  # kSmallSize of that file: a segment is divided only if more remains (should_split)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a `kind` of device needs in addition to the tensors: `workspace_bytes` for its matrix library,
    `context_bytes` for its driver, and what is lost because the allocator rounds sizes up to a multiple of `granule`
    bytes. CUDA's allocator takes the memory of large tensors from the device in multiples of `segment` bytes (0 if
    there are none); a remainder of at most 1 MiB stays with the tensor. With `convolution_workspaces`, convolutions
    allocate the workspace that the profile states for them. With `checkpoint_copies`, a rank keeps a copy of its part
    of the last checkpoint in CPU memory (checkpoint_copy.py)."""

    kind: DeviceKind = "cpu"
    granule: int = 1
    segment: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    convolution_workspaces: bool = False
    checkpoint_copies: bool = False

    def with_checkpoint_copies(self, checkpoint_copies: bool) -> Self:
        return replace(self, checkpoint_copies=checkpoint_copies)

    def rounding(self, size: float) -> float:
        """The bytes that the allocator adds to a tensor of this size."""
        if size <= 0:
            return 0.0
        if self.segment and size >= _LARGE_BYTES:
            rest = ceil(size / self.segment) * self.segment - size
            if rest <= _SMALLEST_REMAINDER_BYTES:
                return rest
        return ceil(size / self.granule) * self.granule - size


CPU_MEMORY = DeviceMemory()
# Granule and segments: kMinBlockSize and kRoundLarge of c10/cuda/CUDACachingAllocator.cpp. Workspace and context were
# measured on an H200 with torch 2.11, and `python -m validation.memory.one_gpu` on a GPU measures them again. The
# workspace is the difference between measured memory and a prediction without workspace, for the two bf16 runs of VGG16
# in validation/memory/one_gpu_h200.json. The context is the memory in use on the device less that of the allocator.
CUDA_MEMORY = DeviceMemory(
    kind="cuda",
    granule=512,
    segment=2 * MIB,
    workspace_bytes=72 * MIB,
    context_bytes=780 * MIB,
    convolution_workspaces=True,
)

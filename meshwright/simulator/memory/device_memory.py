"""What the allocator, the matrix library and the driver of a kind of device add to the memory of tensors."""

from dataclasses import dataclass
from math import ceil

MIB = 2**20
_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc of c10/cuda/CUDACachingAllocator.cpp
_SMALLEST_REMAINDER_BYTES = MIB  # kSmallSize there: a segment is only divided if more than this remains (should_split)


@dataclass(frozen=True)
class DeviceMemory:
    """What a kind of device adds to tensors: `workspace_bytes` of its matrix library, `context_bytes` of its driver,
    and rounding up to the allocator's `granule`. `segment` is the unit in which CUDA's allocator takes large tensors
    from the device; a remainder of under a MiB stays with the tensor. With `convolution_workspaces` convolutions
    allocate the workspace that the profile has for them."""

    granule: int = 1
    segment: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    convolution_workspaces: bool = False

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
# measured on an H200 with torch 2.11, and `python -m validation.memory.one_gpu` on a GPU measures them again: the
# workspace is what the prediction lacks for the two bf16 rows of VGG16 in validation/memory/one_gpu_h200.json, the
# context what the device uses in addition to the allocator.
CUDA_MEMORY = DeviceMemory(
    granule=512, segment=2 * MIB, workspace_bytes=72 * MIB, context_bytes=780 * MIB, convolution_workspaces=True
)

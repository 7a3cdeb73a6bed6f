"""What the allocator, the matrix library and the driver of a kind of device add to the memory of tensors."""

from dataclasses import dataclass
from math import ceil

MIB = 2**20
_LARGE_BYTES = 10 * MIB  # CUDACachingAllocator.cpp, kMinLargeAlloc


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
            if rest <= MIB:
                return rest
        return ceil(size / self.granule) * self.granule - size


CPU_MEMORY = DeviceMemory()
# Granule, segments and their remainder: c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kLargeBuffer,
# kMinLargeAlloc). Measured on an H200 with torch 2.11 (`python -m validation.memory.one_gpu` on a GPU measures it
# again): the workspace is what the two bf16 rows of VGG16 in validation/memory/one_gpu_h200.json leave unexplained,
# the context what the device uses beside the allocator.
CUDA_MEMORY = DeviceMemory(
    granule=512, segment=2 * MIB, workspace_bytes=72 * MIB, context_bytes=780 * MIB, convolution_workspaces=True
)

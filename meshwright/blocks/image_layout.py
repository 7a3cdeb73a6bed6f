"""The memory format `channels_last` of images and of volumes."""

import torch
from torch import Tensor


def channels_last_format(tensor: Tensor) -> torch.memory_format:
    """Returns the format in which a tensor of images (4 dimensions) or volumes (5), or of their filters, has its
    channels last. Tensors of other dimensions keep the format that they have."""
    if tensor.layout != torch.strided:
        return torch.preserve_format
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.preserve_format)

"""Disables the fast path that PyTorch's transformer layers take in evaluation.

The fast path turns padded batches into nested tensors, which cannot be sent from one pipeline stage to the next. On a
GPU its GELU is an approximation, by which the logits of a small encoder in fp64 differ by 0.0025. With the fast path
disabled, every plan and every device evaluates the same function that was trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_attention_fastpath() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)

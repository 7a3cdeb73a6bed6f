"""PyTorch's transformer layers without their fast path for evaluation.

It hands padded batches on in another form, which cannot be sent from stage to stage, and on a GPU its GELU is an
approximation: 0.0025 off in the scores of a small encoder in fp64. Without it every plan and every device evaluates
the function that was trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_attention() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

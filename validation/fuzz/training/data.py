"""The batches of a case: random tokens, features or pictures, and classes as targets."""

import torch
from torch import Tensor

from validation.fuzz.losses import LOSSES
from validation.fuzz.program import Case

Batch = tuple[Tensor, Tensor]


def batches(case: Case) -> list[Batch]:
    """The global batch of each step."""
    generator = torch.Generator().manual_seed(case.seed)
    return [_batch(case, samples, generator) for samples in case.batch_sizes()]


def _batch(case: Case, samples: int, generator: torch.Generator) -> Batch:
    program = case.program
    sizes = program.sizes
    if program.kind in ("tokens", "towers"):
        inputs = torch.randint(0, sizes.V, (samples, sizes.L), generator=generator)
    else:
        shapes = {"features": (sizes.L, sizes.D), "images": (3, sizes.S, sizes.S)}
        shape = shapes.get(program.kind, (sizes.D,))
        inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    by_position = program.kind in ("tokens", "features") and not program.pooled
    target = torch.randint(0, sizes.V, (samples, sizes.L) if by_position else (samples,), generator=generator)
    if LOSSES[case.loss].ignores:
        target.masked_fill_(torch.rand(target.shape, generator=generator) < 0.3, -100)
        target[:1] = 0  # a batch whose targets are all ignored has no mean
    if LOSSES[case.loss].takes_numbers:
        target = torch.nn.functional.one_hot(target, sizes.V).double().movedim(-1, 1)
    return inputs, target

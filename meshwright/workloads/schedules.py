"""Learning-rate schedules that torch does not have as a single class."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshwright.errors import InputError


def warmup_cosine(optimizer: Optimizer, warmup: int, total: int, floor: float = 0.0) -> LambdaLR:
    """Returns a schedule that rises linearly to the optimizer's learning rate over `warmup` steps. It then falls along
    half a cosine to `floor` times this learning rate at step `total`, and stays there. If the job sets `per: epoch`,
    `warmup` and `total` count epochs. The first step is taken at 1/`warmup` of the learning rate, not at zero."""
    if not 0 <= warmup < total:
        raise InputError(f"schedule: warmup is {warmup} and total is {total}: warmup must end before total does")
    if not 0 <= floor <= 1:
        raise InputError(f"schedule: floor is {floor}: it is a share of the learning rate, from 0 to 1")

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / (total - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, share)

"""Seeds the random generators that a model may draw from."""

import random

import numpy as np
import torch


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds the generators of torch, `random` and NumPy. It does not call `torch.manual_seed`, because that stores
    every call with its stack as long as CUDA is not initialized."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

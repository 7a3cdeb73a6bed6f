"""`redraw_weights`: other initial weights for a proof, under which no part of a model is negligible.

A usual initialization hides faults. Behind an output layer of zeros, all gradients are zero, right and wrong ones;
biases of zeros and norms of ones look alike on all ranks. Weights are drawn uniformly around the mean of the values
that they have, which is 0 for most and 1 for those of norms, with the standard deviation

    1 / √(fan-in)    matrices, convolutions and embeddings
    0.3              vectors and single numbers: biases, norms, gates

Each is a function of (seed, name of the parameter), so all ranks and the reference have the same ones. Weights that are
not trained stay. Running statistics are drawn, too, and variances stay positive.
"""

import math

import torch
from torch import Tensor, nn

from meshwright.data.order import derive_seed

VECTOR_DEVIATION = 0.3
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def redraw_weights(model: nn.Module, seed: int) -> None:
    """Draws the weights that are trained, and running statistics, in place. A tied weight is drawn once, under its
    first name."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        parameter.copy_(_mean(parameter) + _deviation(module, parameter) * _draw(parameter, seed, name))
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0  # the row of padding, which is never trained
    for name, buffer in model.named_buffers():
        own_name = name.rpartition(".")[2]
        if own_name == "running_mean":
            buffer.add_(VECTOR_DEVIATION * _draw(buffer, seed, name))
        elif own_name == "running_var":
            buffer.mul_(1 + VECTOR_DEVIATION * _draw(buffer, seed, name))


def _mean(parameter: Tensor) -> complex:
    """The mean of the values. numpy adds them up in one thread: torch's order of summing, and with it the last digits,
    would depend on the number of threads, which ranks and reference have different ones of."""
    wide = parameter.detach().cpu().to(torch.complex128 if parameter.is_complex() else torch.float64)
    mean: complex = wide.numpy().mean().item() if wide.numel() else 0.0
    return mean


def _deviation(module: nn.Module, parameter: Tensor) -> float:
    if parameter.dim() < 2 or not parameter.numel():
        return VECTOR_DEVIATION
    if parameter.dim() == 2 or isinstance(module, _CONVOLUTIONS):
        return 1 / math.sqrt(parameter[0].numel())
    return 1 / math.sqrt(max(parameter.shape[-2:]))  # experts and heads have their matrices in the last two dimensions


def _draw(tensor: Tensor, seed: int, name: str) -> Tensor:
    """Returns numbers between -√3 and √3, with mean 0 and standard deviation 1. They are drawn in fp32 and on the CPU,
    so that they are the same for each dtype and device."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "random start", name))
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    numbers = (2 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1) * math.sqrt(3)
    return (torch.view_as_complex(numbers) if tensor.is_complex() else numbers).to(tensor)

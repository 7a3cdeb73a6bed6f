"""Copies of models whose modules keep results of operators as plain attributes, which `copy.deepcopy` refuses to copy:
the weight that the older `torch.nn.utils.weight_norm` or pruning computes from parameters."""

from torch import Tensor, nn


def kept_results(model: nn.Module) -> dict[int, Tensor]:
    """Returns entries for the memo of `copy.deepcopy`: for each of these tensors, by its id, a copy without its
    autograd graph. The module computes it anew in its next forward pass."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return {
        id(value): value.detach().clone()
        for value in attributes
        if isinstance(value, Tensor) and value.grad_fn is not None
    }

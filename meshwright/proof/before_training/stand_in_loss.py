"""A loss for models that return none, in scripts that compute it in their own loop: the check sees the forward pass and
the backward pass of the model, which are what a plan divides."""

from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.model_io.batch import WHOLE_BATCH, split_batch
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.proof.torch_private import tree_leaves

TARGET = "meshwright_target"  # the key of the target that is added to batches that are dicts


def stand_in_loss(output: Any, target: Any) -> Tensor:
    """Returns the mean of the sines of all floating-point numbers in a model's output. It is a mean over samples and
    over tokens, and its gradient differs from number to number."""
    register_dataclasses(output)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tensors = [tensor for tensor in tensors if tensor.requires_grad or not torch.is_grad_enabled()]
    if not tensors:
        raise InputError("the model returns no tensor with a gradient")
    return torch.stack([tensor.sin().mean() for tensor in tensors]).sum()


def with_target(batch: Any, samples: int) -> Any:
    """Returns the batch with a target that nothing uses, so that the model gets everything that was in the batch."""
    model_batch = split_batch(batch, WHOLE_BATCH)
    target = torch.zeros(samples)
    if model_batch.keywords:
        return {**model_batch.keywords, TARGET: target}
    return (*model_batch.arguments, target)

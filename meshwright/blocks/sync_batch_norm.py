"""`nn.SyncBatchNorm` without the exchange of torch, which needs GPUs and the process group of all ranks. Tracing and
one-device references run it as plain BatchNorm; under a plan, parallel/replicate/batch_norm.py takes its place."""

from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def normalize_locally(model: nn.Module) -> None:
    """Makes every `nn.SyncBatchNorm` of the model normalize over the batch that it gets, as it does in a process
    without ranks. Classes and names of modules stay."""
    for layer in model.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            layer.forward = MethodType(_BatchNorm.forward, layer)  # type: ignore[method-assign]

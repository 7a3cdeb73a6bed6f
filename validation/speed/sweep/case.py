"""A model of the sweep: how it and its batches are built, at the size of one large GPU and at a tiny size for a CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Sizes = Mapping[str, Any]  # `samples` of a batch, and what the builders of the model and of its batch read
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class ModelCase:
    """A model of the sweep. `build` and `batch` are called with `full` or `tiny` within `torch.device(...)`. Without
    `loss` the model returns its loss: a number, an output with the field `loss`, or a dict of losses that are summed.
    The batch then goes to the model whole, otherwise its last item is the target."""

    name: str
    library: Literal["torchvision", "timm", "transformers", "own"]
    build: Callable[[Sizes], nn.Module]
    batch: Callable[[Sizes], Any]
    full: Sizes
    tiny: Sizes
    loss: Loss | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    channels_last: bool = False

    def sizes(self, tiny: bool) -> Sizes:
        return self.tiny if tiny else self.full

    def make_model(self, tiny: bool, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            return self.build(self.sizes(tiny)).train()

    def make_batch(self, tiny: bool, device: torch.device) -> Any:
        """A batch on the device. Images of convolutional nets are in channels_last."""
        torch.manual_seed(1)
        with device:
            batch = self.batch(self.sizes(tiny))
        return tree_map(in_channels_last, batch) if self.channels_last else batch

    def make_optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def samples(self, tiny: bool) -> int:
        return int(self.sizes(tiny)["samples"])


def in_channels_last(value: Any) -> Any:
    """A tensor of images or of volumes in channels_last; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (4, 5):
        memory_format = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
        return value.contiguous(memory_format=memory_format)
    return value

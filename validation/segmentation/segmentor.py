"""A backbone with its heads, trained as the published rows were: `Segmentor` returns its loss.

The heads come one after the other, each with its loss, the auxiliary ones last: so what each keeps is there while
the next one runs, and the backward pass begins with the last auxiliary head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.era import log_softmax, softmax
from validation.segmentation.layers import resize

IGNORED = 255


class Segmentor(nn.Module):
    """`heads` take the list of the backbone's features and return a map of class scores, or several. `recent` rows
    were measured with torch 1.11 or later, whose log-softmax keeps its output alone."""

    def __init__(
        self, backbone: nn.Module, heads: Sequence[nn.Module], recent: bool = False, dice: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleList(heads)
        self.recent = recent
        self.dice = dice

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        features = self.backbone(images)
        total = images.new_zeros(())
        for head in self.heads:
            scores = head(features)
            for one in scores if isinstance(scores, list | tuple) else (scores,):
                total = total + pixel_loss(one, masks, self.recent, self.dice)
        return total


def pixel_loss(scores: Tensor, masks: Tensor, recent: bool = False, dice: bool = False) -> Tensor:
    """Cross entropy of scores that are brought to the masks' size first, in fp32; `dice` adds the overlap's loss."""
    large = resize(scores.float(), masks.shape[-2:])
    logs = torch.log_softmax(large, 1) if recent else log_softmax(large, 1)
    loss = F.nll_loss(logs, masks, reduction="none", ignore_index=IGNORED).mean()
    return loss + _overlap_loss(large, masks) if dice else loss


def _overlap_loss(scores: Tensor, masks: Tensor) -> Tensor:
    shares = softmax(scores, 1)
    classes = torch.zeros_like(shares).scatter_(1, masks.unsqueeze(1), 1.0)
    both = (shares * classes).sum(dim=(2, 3))
    either = shares.pow(2).sum(dim=(2, 3)) + classes.pow(2).sum(dim=(2, 3))
    return (1 - (2 * both + 1) / (either + 1)).mean()

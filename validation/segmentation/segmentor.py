"""A backbone with its heads, trained as in the published rows: `Segmentor` returns its loss.

The heads run one after the other, each followed by its loss, the auxiliary heads last. So the tensors that a head saves
are allocated while the next head runs, and the backward pass begins with the last auxiliary head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.era import log_softmax, softmax
from validation.segmentation.layers import resize

IGNORED = 255


class Segmentor(nn.Module):
    """Each of the `heads` takes the list of the backbone's features and returns one or several maps of class scores.
    `recent` is for rows that were measured with torch 1.11 or later, whose log-softmax saves only its output."""

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
            for score_map in scores if isinstance(scores, list | tuple) else (scores,):
                total = total + pixel_loss(score_map, masks, self.recent, self.dice)
        return total


def pixel_loss(scores: Tensor, masks: Tensor, recent: bool = False, dice: bool = False) -> Tensor:
    """The cross entropy in fp32 of scores that are first resized to the masks; `dice` adds the Dice loss."""
    large = resize(scores.float(), masks.shape[-2:])
    logs = torch.log_softmax(large, 1) if recent else log_softmax(large, 1)
    loss = F.nll_loss(logs, masks, reduction="none", ignore_index=IGNORED).mean()
    return loss + _dice_loss(large, masks) if dice else loss


def _dice_loss(scores: Tensor, masks: Tensor) -> Tensor:
    probabilities = softmax(scores, 1)
    classes = torch.zeros_like(probabilities).scatter_(1, masks.unsqueeze(1), 1.0)
    both = (probabilities * classes).sum(dim=(2, 3))
    either = probabilities.pow(2).sum(dim=(2, 3)) + classes.pow(2).sum(dim=(2, 3))
    return (1 - (2 * both + 1) / (either + 1)).mean()

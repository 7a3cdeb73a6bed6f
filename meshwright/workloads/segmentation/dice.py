"""The Dice coefficient of a segmentation as loss and as metric: 2 |A ∩ B| / (|A| + |B|) for the pixels A of a class in
the prediction and B in the mask. It is computed for each sample and class; the background, class 0, is left out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiceCrossEntropy(nn.Module):
    """The mean over samples of a sample's mean cross entropy plus `dice_weight` times one minus its Dice coefficient,
    which is computed from probabilities and is the mean over classes. `smooth` is added to numerator and denominator,
    so that a class that neither occurs nor is predicted has the coefficient 1.

    The coefficients of a sample do not depend on the other samples of the batch. Therefore the loss is the same under
    every plan."""

    def __init__(self, dice_weight: float = 1.0, smooth: float = 1.0) -> None:
        super().__init__()
        self.dice_weight = dice_weight
        self.smooth = smooth

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        probabilities = output.softmax(1)[:, 1:]
        overlap, total = _overlap_and_total(probabilities, target)
        dice = (2 * overlap + self.smooth) / (total + self.smooth)
        # All samples have equally many pixels, so the mean over pixels is the mean over samples.
        return F.cross_entropy(output, target) + self.dice_weight * (1 - dice).mean()


def mean_dice(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Returns the sum over samples of the mean Dice coefficient of the predicted classes, and the number of samples. A
    class that neither occurs in a sample nor is predicted is left out of the sample's mean; where this is so for all
    classes, the coefficient is 1."""
    prediction = F.one_hot(output.argmax(1), output.shape[1]).movedim(-1, 1)[:, 1:]
    overlap, total = _overlap_and_total(prediction, target)
    counts = total > 0
    dice = torch.where(counts, 2 * overlap.double() / total.clamp(min=1), 0)
    of_samples = torch.where(counts.any(1), dice.sum(1) / counts.sum(1).clamp(min=1), 1)
    return of_samples.sum(), len(target)


def _overlap_and_total(predicted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns |A ∩ B| and |A| + |B| for each sample and class (batch, classes - 1). `predicted` is how far each pixel
    belongs to each class but the background (batch, classes - 1, *sizes)."""
    classes = torch.arange(1, predicted.shape[1] + 1, device=target.device)
    is_class = target.unsqueeze(1) == classes.reshape(-1, *[1] * (target.dim() - 1))
    overlap = torch.where(is_class, predicted, 0).flatten(2).sum(-1)
    return overlap, predicted.flatten(2).sum(-1) + is_class.flatten(2).sum(-1)

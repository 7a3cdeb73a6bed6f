"""`DetectorLoss`: the losses of torchvision's detectors, over the images of all ranks.

A detector returns a dict of losses in training mode, and trains on their sum. Most of them are means, not over images
but over what is found in them:

- R-CNNs: over the anchors and the proposals that were drawn, the proposals with an object, and the visible keypoints;
- SSD and FCOS: over the anchors that match an object, or 1 if there are none.

    loss = Σ over the losses k and the ranks of (count of the rank · value of the rank) / max(1, Σ counts)

RetinaNet's losses are means over images, so nothing needs to be counted.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.train.loss.cross_entropy import Count, CountTargetsInModules

_DETECTION = "torchvision.models.detection"
_DETECTORS = (("generalized_rcnn", "GeneralizedRCNN"), ("ssd", "SSD"), ("fcos", "FCOS"))
# What each loss is a mean over. The losses of SSD and FCOS have the same names.
_COUNTED = {
    "loss_objectness": "anchors",
    "loss_rpn_box_reg": "anchors",
    "loss_classifier": "proposals",
    "loss_box_reg": "proposals",
    "loss_mask": "objects",
    "loss_keypoint": "keypoints",
    "classification": "matches",
    "bbox_regression": "matches",
    "bbox_ctrness": "matches",
}
Across = Callable[[Tensor], tuple[Tensor, int]]


def has_detector(model: nn.Module) -> bool:
    """Whether a module of the model is one of torchvision's detectors whose losses are means over boxes."""
    classes = tuple(
        getattr(sys.modules[f"{_DETECTION}.{file}"], name)
        for file, name in _DETECTORS
        if f"{_DETECTION}.{file}" in sys.modules
    )
    return any(isinstance(module, classes) for module in model.modules())


class BoxCounts:
    """Within `recording()`, the detector's forward pass counts the boxes that its losses are means over, in `numbers`
    by the values of `_COUNTED`."""

    def __init__(self) -> None:
        self.numbers: dict[str, Count] = {}
        self._counting = CountTargetsInModules()  # of the cross entropies: first of the classes, then of the keypoints

    @contextmanager
    def recording(self, has_samples: bool = True) -> Iterator[None]:
        """Within this context, the functions of torchvision that see which boxes are counted note their numbers.
        `has_samples` is part of the interface of a loss (`Loss.forward_context`), and makes no difference here."""
        self.numbers = {}
        self._counting.counts.clear()
        functions = list(_counting_functions(self.numbers))
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
        for owner, name, counting in functions:
            setattr(owner, name, counting)
        try:
            with self._counting.active():
                yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def of(self, loss: str) -> Count | None:
        """Returns the number of boxes that this loss is a mean over; None if it is not known."""
        if loss == "loss_keypoint":
            counts = self._counting.counts
            return counts[1] if len(counts) > 1 else 0.0
        return self.numbers.get(_COUNTED.get(loss, ""))


class DetectorLoss:
    """Called with the dict of losses that a detector returned and whether the batch has samples, it returns this rank's
    part of the loss; the parts of all ranks are added. Without samples, the batch has no weight. The detector's forward
    pass runs within `counts.recording()`."""

    def __init__(self, counts: BoxCounts, across: Across | None = None) -> None:
        self._counts = counts
        self._across = across

    def joined(self, across: Across) -> "DetectorLoss":
        """Returns the loss for one rank of many. `across` returns the rows of all ranks."""
        return DetectorLoss(self._counts, across)

    def __call__(self, output: Any, has_samples: bool) -> Tensor:
        losses = self._losses(output)
        values = torch.stack([loss.reshape(()) for loss in losses.values()])
        if self._across is None:
            return values.sum() if has_samples else values.nan_to_num().sum() * 0
        counts = [torch.as_tensor(self._counts.of(name), device=values.device).double() for name in losses]
        local = torch.stack(counts) * has_samples
        of_all_ranks = self._across(local.unsqueeze(0))[0].sum(0)
        # A mean over nothing is divided by 1 on the rank, too.
        weights = local.clamp(min=int(has_samples)) / of_all_ranks.clamp(min=1)
        return (values if has_samples else values.nan_to_num()).mul(weights.to(values.dtype)).sum()

    def _losses(self, output: Any) -> Mapping[str, Tensor]:
        if not isinstance(output, Mapping):
            raise InputError(
                f"the model has one of torchvision's detectors, but returned {type(output).__name__} in training mode:"
                " return the detector's dict of losses, because each of them is a mean over another number of boxes"
            )
        unknown = next((name for name in output if self._counts.of(name) is None), None)
        if unknown is not None:
            raise InputError(
                f"the detector returned a loss '{unknown}', of which it is not known what it is a mean over: known are"
                f" {', '.join(_COUNTED)}. Train on a single rank, or leave the loss out"
            )
        return output


def _counting_functions(counts: dict[str, Count]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yields the functions of torchvision that know the numbers of boxes: the class, the name of the function in it,
    and a function that does the same and adds to `counts`."""

    def count_drawn(result: tuple[list[Tensor], list[Tensor]], arguments: Any) -> None:
        positive, negative = (sum(mask.sum() for mask in masks) for masks in result)
        if "anchors" not in counts:  # the proposals of the boxes are drawn after the anchors
            counts["anchors"] = positive + negative
        else:
            counts["proposals"], counts["objects"] = positive + negative, positive

    def count_matches(result: Any, arguments: Any) -> None:
        counts["matches"] = sum((matched >= 0).sum() for matched in arguments[-1])

    for file, name, function, count in (
        ("_utils", "BalancedPositiveNegativeSampler", "__call__", count_drawn),
        ("ssd", "SSD", "compute_loss", count_matches),
        ("fcos", "FCOSHead", "compute_loss", count_matches),
    ):
        if f"{_DETECTION}.{file}" in sys.modules:
            owner = getattr(sys.modules[f"{_DETECTION}.{file}"], name)
            yield owner, function, _then(getattr(owner, function), count)


def _then(function: Callable[..., Any], count: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        count(result, arguments)
        return result

    return call

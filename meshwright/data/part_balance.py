"""Describes to users how evenly a data set is divided into fixed parts: the sizes of the parts, and whether their
labels have the same distribution."""

from collections.abc import Sequence
from typing import Any

from meshwright.data.partition import PartPartition

SKEWED = 0.1  # users are warned if `PartPartition.skew` is above this value


def labels_of(dataset: Any) -> list[int] | None:
    """Returns the integer labels of all samples if the data set has them in an attribute `labels` or `targets`, as
    torchvision's data sets have. Returns None if it does not, or if the labels are not integers."""
    for name in ("labels", "targets"):
        labels = getattr(dataset, name, None)
        if labels is not None and not callable(labels) and len(labels) == len(dataset):
            try:
                return [int(label) for label in labels]
            except (TypeError, ValueError):
                return None
    return None


def describe_parts(partition: PartPartition, labels: Sequence[int] | None) -> list[str]:
    """Returns lines for the log: the sizes of parts and batches, and a warning if the labels are skewed. `labels` is
    None if they are not known."""
    sizes = partition.sizes
    size_difference = (max(sizes) - min(sizes)) / max(sizes)
    lines = [
        f"data: {partition.parts} parts of {min(sizes):,} to {max(sizes):,} samples"
        f" (sizes differ by {size_difference:.1%}),"
        f" {partition.batches:,} batches per epoch, of at most {partition.batch} samples"
    ]
    if labels is not None:
        skew, part = partition.skew(labels)
        if skew > SKEWED:
            lines.append(
                f"warning: labels are skewed: {skew:.0%} of the labels in part {part} would be others if all parts had"
                " the same distribution of labels. Batches mix all parts, but local BatchNorm and local steps see only"
                " the parts of one rank: shuffle the data set once, or use data.partition batch"
            )
    return lines

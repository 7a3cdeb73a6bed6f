"""What a user is told of a data set that lies in fixed parts: how large they are, and whether they look alike."""

from collections.abc import Sequence
from typing import Any

from meshwright.data.partition import ByPart

SKEWED = 0.1  # of a part's samples have labels that an even part would not have


def labels_of(dataset: Any) -> list[int] | None:
    """Where the data set knows them without reading its samples, as torchvision's and ours do."""
    for name in ("labels", "targets"):
        found = getattr(dataset, name, None)
        if found is not None and not callable(found) and len(found) == len(dataset):
            try:
                return [int(label) for label in found]
            except (TypeError, ValueError):
                return None
    return None


def told_of_parts(division: ByPart, labels: Sequence[int] | None) -> list[str]:
    sizes = division.sizes
    uneven = (max(sizes) - min(sizes)) / max(sizes)
    lines = [
        f"data: {division.parts} parts of {min(sizes):,} to {max(sizes):,} samples ({uneven:.1%} apart),"
        f" {division.batches:,} batches an epoch of at most {division.batch}"
    ]
    if labels is not None:
        skew, part = division.skew(labels)
        if skew > SKEWED:
            lines.append(
                f"warning: labels are skewed: {skew:.0%} of part {part}'s samples have labels that an even part would"
                " not have. Batches mix all parts, but what ranks do alone (local BatchNorm, local steps) sees one:"
                " shuffle the data set once, or use data.partition batch"
            )
    return lines

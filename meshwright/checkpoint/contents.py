"""What the contents of every checkpoint have in common, whatever the model is. A checkpoint without it is damaged."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshwright.checkpoint.frozen import FROZEN, is_description
from meshwright.checkpoint.index import SavedTensor
from meshwright.checkpoint.state import GROUPS, split_entry_key


def check_contents(tensors: Mapping[str, SavedTensor], objects: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the contents of a checkpoint whatever the model is: small objects that are missing or
    of another kind than is saved. None if nothing is."""
    groups, scale = objects.get(GROUPS), objects.get("loss_scale")
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        return f"it has no {GROUPS}" if groups is None else f"its {GROUPS} are not lists of parameters and options"
    wrong = next((option for group in groups for option in group.items() if not _is_option(*option)), None)
    if wrong is not None:
        return f"its {GROUPS} have {wrong[0]!r:.100} = {wrong[1]!r:.100}, which is no number"
    if "schedule" not in objects:
        return "it has no schedule"
    if scale is not None and not _is_loss_scale(scale):
        return "its loss_scale is not a factor with two counts"
    frozen = objects.get(FROZEN, {})
    if not isinstance(frozen, dict) or not all(map(is_description, frozen.values())):
        return "its descriptions of frozen weights are not dtypes, shapes and digests"
    held = next((name for name in frozen if f"model/{name}" in tensors or f"model/{name}" in objects), None)
    if held is not None:
        return f"it has {held!r:.100}, but says that this weight was left out"
    names = [name for group in groups for name in group["names"]]
    trained = set(names)
    if len(trained) < len(names):
        return f"its {GROUPS} have a parameter twice"
    both = next((key for key in objects if key in tensors), None)
    if both is not None:
        return f"it has {both:.100} as a tensor and as an object"
    for key in (*tensors, *objects):
        if key.startswith("optimizer/") and split_entry_key(key)[0] not in trained:
            return f"it has {key:.100}, but its {GROUPS} do not have that parameter"
    return None


def _is_group(group: Any) -> bool:
    names = group.get("names") if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_option(name: str, value: Any) -> bool:
    """Whether an optimizer can have this option: no option is NaN, and learning rates are finite numbers."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_rate = name in ("lr", "initial_lr")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return not is_rate
    return math.isfinite(value) if is_rate else not math.isnan(value)


def _is_loss_scale(scale: Any) -> bool:
    numbers: list[Any] = [scale.get(name) for name in ("value", "good", "skipped")] if isinstance(scale, dict) else []
    are_numbers = all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers)
    return len(numbers) > 0 and are_numbers and numbers[0] > 0

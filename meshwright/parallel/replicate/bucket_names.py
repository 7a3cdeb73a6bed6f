"""A bucket of gradients in words, for messages about ranks that wait for each other."""

from collections.abc import Sequence

GRADIENT_EXCHANGE = "gradient exchange"


def describe_bucket(number: int | None, names: Sequence[str]) -> str:
    """Returns `gradient exchange of layer4.2 (bucket 1)`. `names` are those of the bucket's parameters, in the order
    of the model. If they have no module in common, the first and the last one are named."""
    if number is None:
        return GRADIENT_EXCHANGE
    owners = [name.rpartition(".")[0] or name for name in names if name]
    if not owners:
        return f"{GRADIENT_EXCHANGE} of bucket {number}"
    common = _common_module(owners)
    modules = common or (owners[0] if owners[0] == owners[-1] else f"{owners[0]} to {owners[-1]}")
    return f"{GRADIENT_EXCHANGE} of {modules} (bucket {number})"


def _common_module(owners: Sequence[str]) -> str:
    parts = [owner.split(".") for owner in owners]
    shared: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)

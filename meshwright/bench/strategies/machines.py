"""The machines on which strategies are compared, for each number of devices, and the precisions."""

from collections.abc import Mapping
from typing import get_args

from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local, find_cluster
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import MOST_DEVICES
from meshwright.plan_fields.groups import NumericsGroup

_PRECISIONS = tuple(
    name for name in get_args(NumericsGroup.model_fields["precision"].annotation) if name not in ("auto", "fp8")
)


def parse_precisions(text: str) -> tuple[str, ...]:
    """Returns the precisions of `--precision fp32,bf16`."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in _PRECISIONS:
            hint = did_you_mean(name, _PRECISIONS) or f": choose from {', '.join(_PRECISIONS)}"
            raise InputError(f"--precision {text}: there is no precision '{name}'{hint}")
    return names


def machines_of_ranks(name: str, ranks: str | None) -> dict[int, Cluster]:
    """Returns the machines by number of devices: one device, and the numbers of `--ranks 1,2,4`, or all devices of the
    cluster with this name if `ranks` is None."""
    cluster = find_cluster(name, measure_machine)
    counts = [cluster.device_count] if ranks is None else _parse_counts(ranks)
    return {count: _with_devices(cluster, count, ranks) for count in sorted({1, *counts})}


def is_local(machines: Mapping[int, Cluster]) -> bool:
    """Whether the machines are this one, so that strategies can be measured."""
    try:
        check_is_local(machines[max(machines)])
    except InputError:
        return False
    return True


def _parse_counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--ranks {text}: write numbers of devices, such as 1,2,4") from None
    for count in counts:
        if not 1 <= count <= MOST_DEVICES:
            raise InputError(f"--ranks {text}: {count} is not between 1 and {MOST_DEVICES:,}")
    return counts


def _with_devices(cluster: Cluster, count: int, ranks: str | None) -> Cluster:
    if count == cluster.device_count:
        return cluster
    per_node = cluster.nodes[0].count
    if cluster.kind == "cpu" and count > per_node:  # ranks share the cores
        return find_cluster(f"{count}xcpu", measure_machine)
    if count > per_node:
        raise InputError(
            f"--ranks {ranks}: {count} devices are neither all {cluster.device_count} of '{cluster.name}' nor on one of"
            f" its machines, which have {per_node}: choose at most {per_node}, or {cluster.device_count}"
        )
    return cluster.with_device_count(count)

"""`ExpertLoads`: how many tokens the routers of this rank sent to each expert, and whether a router is skewed.

load of expert e        its tokens · experts / all routed tokens: 1 if routing is even         relative_loads()
load of rank r          the mean load of its experts: what the slowest rank waits for          rank_loads()
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.differentiable_collectives import AxisGroup

SKEWED = 3.0  # times the even share


class ExpertLoads:
    """Counts the tokens that were routed to each expert in training, by layer."""

    def __init__(self, group: AxisGroup, token_group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._token_group = token_group
        self._counts: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        self._logged: dict[str, list[int]] = {}

    def since_log(self, counts: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Returns how much these counts have grown since the last call; they are those of `gather_counts`."""
        before, self._logged = self._logged, dict(counts)
        return {
            layer: [
                now - earlier for now, earlier in zip(of_layer, before.get(layer, [0] * len(of_layer)), strict=True)
            ]
            for layer, of_layer in counts.items()
        }

    def add(self, layer: str, counts: Sequence[int], training: bool) -> None:
        """Adds the number of tokens of each expert of the layer. Evaluation is not counted. The numbers are on the
        host: operators on a sum of earlier steps would be different ones when a block is recomputed."""
        if training:
            earlier = self._counts.get(layer, [0] * len(counts))
            self._counts[layer] = [total + count for total, count in zip(earlier, counts, strict=True)]

    def add_rows(self, layer: str, *, routed: int = 0, computed: int = 0) -> None:
        """Adds the rows that this rank sent to experts, or that its experts computed. Over all ranks, both are equal
        unless rows are lost or doubled on their way."""
        before = self._rows.get(layer, (0, 0))
        self._rows[layer] = (before[0] + routed, before[1] + computed)

    def take_rows(self) -> dict[str, tuple[int, int]]:
        """The rows that were (routed, computed) on this rank since the last call, by layer."""
        rows, self._rows = self._rows, {}
        return rows

    def reset(self) -> None:
        self._counts.clear()
        self._logged.clear()

    def counts(self) -> dict[str, list[int]]:
        """The number of tokens of each expert since the last `reset`, over all data and context ranks, by layer. All
        ranks of the same pipeline stage call this together."""
        result: dict[str, list[int]] = {}
        for layer, local in self._counts.items():
            total = torch.tensor(local, device=self._device)
            dist.all_reduce(total, group=self._token_group)
            result[layer] = total.tolist()
        return result

    @property
    def ranks(self) -> int:
        """The number of ranks over which the experts are divided."""
        return self._group.size


def gather_counts(loads: ExpertLoads | None) -> dict[str, list[int]]:
    """The tokens of each expert of all layers of the model, by layer; empty if no experts are divided. All ranks call
    this together."""
    if loads is None:
        return {}
    of_ranks: list[dict[str, list[int]]] = all_gather_values(loads.counts())
    return {layer: counts for of_rank in of_ranks for layer, counts in of_rank.items()}


def report_loads(counts: Mapping[str, list[int]], ranks: int) -> str:
    """Returns a line for the end of a run: how even the routers of all layers were. Warns of a skewed router."""
    if warning := skew_warning(counts, ranks):
        warnings.warn(warning, stacklevel=2)
    experts = [max(relative_loads(of_layer)) for of_layer in counts.values()]
    busiest = [max(rank_loads(of_layer, ranks)) for of_layer in counts.values()]
    return (
        f"experts of {len(counts)} layers: the most used one gets {max(experts):.2f} times its even share of tokens,"
        f" the busiest of {ranks} ranks {max(busiest):.2f} times (medians over layers {median(experts):.2f} and"
        f" {median(busiest):.2f})"
    )


def relative_loads(counts: list[int]) -> list[float]:
    """The tokens of each expert as a multiple of its even share; all 0 if there were none."""
    total = sum(counts)
    return [count * len(counts) / total if total else 0.0 for count in counts]


def rank_loads(counts: list[int], ranks: int) -> list[float]:
    """The tokens of each rank's experts as a multiple of the rank's even share."""
    local = len(counts) // ranks
    return relative_loads([sum(counts[begin : begin + local]) for begin in range(0, len(counts), local)])


@dataclass(frozen=True)
class Skew:
    """The layer whose router is the most uneven: its most used `expert` gets `load` times its even share of tokens, and
    the experts of `rank`, of the ranks of the expert axis, `rank_load` times theirs. `layers` is the number of layers
    with such an expert."""

    layer: str
    expert: int
    load: float
    rank: int
    rank_load: float
    layers: int


def largest_skew(counts: Mapping[str, list[int]], ranks: int) -> Skew | None:
    """Returns the largest skew; None if no expert gets more than `SKEWED` times its share, or fewer than 4 experts
    can."""
    loads = {layer: max(relative_loads(of_layer)) for layer, of_layer in counts.items() if len(of_layer) > SKEWED}
    layer = max(loads, key=lambda name: loads[name], default=None)
    if layer is None or loads[layer] <= SKEWED:
        return None
    of_ranks = rank_loads(counts[layer], ranks)
    return Skew(
        layer,
        counts[layer].index(max(counts[layer])),
        loads[layer],
        of_ranks.index(max(of_ranks)),
        max(of_ranks),
        sum(load > SKEWED for load in loads.values()),
    )


def skew_warning(counts: Mapping[str, list[int]], ranks: int) -> str | None:
    """A sentence about the largest skew; None if there is none."""
    skew = largest_skew(counts, ranks)
    if skew is None:
        return None
    return (
        f"the router of {skew.layer} is skewed: expert {skew.expert} of {len(counts[skew.layer])} gets {skew.load:.1f}"
        f" times its even share of tokens, and rank {skew.rank} of the {ranks} ranks of the expert axis computes"
        f" {skew.rank_load:.1f} times the mean, for which the others wait ({skew.layers} of {len(counts)} layers have"
        " such an expert). A router loss, or a smaller axes.expert, evens it out"
    )

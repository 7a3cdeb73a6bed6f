"""The data ranks of a plan on machines that are not alike: on which devices each lies, and how many samples of a global
batch it gets.

    rank          = (pipeline rank × data ranks + data rank) × ranks of a group + ...    `MESH_ORDER`, _node_of_ranks
    group         = context × tensor: the neighbouring ranks that share the samples of a data rank on one stage
    device        = that of the group's ranks; of ranks that are not alike, the slowest           data_rank_groups
    samples       = those of `plan.shares`, in proportion to the global batch; else an even share
    shard part    = that of the rank's coordinate on the shard axis, by `plan.shares.shards`; else an even part
    step          = the longest step of all data ranks: the others wait for it                    predict.py

Data ranks with equal devices, equal parts and equally many samples are predicted once; one sample fewer counts as
equally many, because whole samples cannot always be divided among equal ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.cluster.cluster import Cluster, Node
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.plan_fields.shares import describe_shares, share_sizes
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.step_inputs import rate_of


@dataclass(frozen=True)
class DataRankGroup:
    """Data ranks that are alike: their numbers, the node of each of their pipeline ranks, how many samples of a global
    batch the one with most gets, and the part that each of them holds of what the shard axis divides (None: an even
    part)."""

    ranks: tuple[int, ...]
    nodes: tuple[Node, ...]
    samples: int
    shard_part: float | None = None

    @property
    def devices(self) -> str:
        """The names of the devices by pipeline rank, such as `A100-80GB, V100-16GB`."""
        return ", ".join(dict.fromkeys(node.device.name for node in self.nodes))

    @property
    def numbers(self) -> str:
        """The numbers of the data ranks, such as `data ranks 0 to 7`."""
        if len(self.ranks) == 1:
            return f"data rank {self.ranks[0]}"
        is_range = self.ranks[-1] - self.ranks[0] == len(self.ranks) - 1
        return f"{'' if is_range else f'{len(self.ranks)} of '}data ranks {self.ranks[0]} to {self.ranks[-1]}"

    def microbatch_samples(self, plan: Plan) -> int:
        """The samples in the largest microbatch of one of the ranks."""
        return -(-self.samples // plan.microbatches)

    def mean_microbatch_samples(self, plan: Plan) -> float:
        """The mean number of samples in a microbatch. A rank with fewer samples than microbatches computes some with a
        sample that does not count."""
        return max(self.samples / plan.microbatches, min(1.0, self.samples))


def is_divided_unequally(cluster: Cluster, plan: Plan) -> bool:
    """Whether data ranks of the plan may take different times for a step."""
    return bool(plan.shares.samples or plan.shares.uneven_shards) or not cluster.is_uniform


def data_rank_groups(cluster: Cluster, plan: Plan, global_batch: int) -> list[DataRankGroup]:
    """The data ranks of a plan in groups that are alike, in the order of their first rank. Raises an `InputError` if a
    rank gets no sample."""
    samples: Sequence[int] = [-(-global_batch // plan.data_ranks)] * plan.data_ranks
    if plan.shares.samples:
        samples = share_sizes(global_batch, plan.shares.samples)
        if not min(samples):
            raise InputError(
                f"shares.samples ({describe_shares(plan.shares.samples)}) leave data rank {samples.index(0)} none of"
                f" the {global_batch} samples of a batch: give it a larger share, or raise the batch"
            )
    kinds, groups = cluster.kinds, list[tuple[tuple[tuple[int, ...], float | None], list[int]]]()
    for rank, of_stages in enumerate(_kinds_of_data_ranks(cluster, plan)):
        key = of_stages, plan.shard_part(rank % plan.axes.shard) if plan.shares.shards else None
        alike = next((ranks for other, ranks in groups if other == key and _as_many(samples, ranks, rank)), None)
        if alike is None:
            groups.append((key, [rank]))
        else:
            alike.append(rank)
    return [
        DataRankGroup(
            tuple(ranks), tuple(kinds[kind] for kind in of_stages), max(samples[rank] for rank in ranks), part
        )
        for (of_stages, part), ranks in groups
    ]


def _as_many(samples: Sequence[int], ranks: Sequence[int], rank: int) -> bool:
    return abs(samples[ranks[0]] - samples[rank]) <= 1 and abs(samples[ranks[-1]] - samples[rank]) <= 1


def groups_are_alike(axes: Axes, cluster: Cluster) -> bool:
    """Whether the ranks of each context and tensor group, which compute together, have equal devices."""
    if cluster.is_uniform or axes.context * axes.tensor == 1:
        return True
    groups = _grid(cluster, Plan(axes=axes))
    return bool((groups == groups[:, :, :1]).all())


def _kinds_of_data_ranks(cluster: Cluster, plan: Plan) -> list[tuple[int, ...]]:
    """For each data rank and each of its pipeline ranks, the index of its kind in `cluster.kinds`."""
    if cluster.is_uniform:
        return [(0,) * plan.axes.pipeline] * plan.data_ranks
    kinds = cluster.kinds
    dtype = product_dtype(plan.numerics.precision)
    by_speed = sorted(range(len(kinds)), key=lambda kind: rate_of(kinds[kind], dtype))
    speed_order = np.argsort(by_speed)
    slowest = speed_order[_grid(cluster, plan)].min(axis=2)  # by pipeline rank and data rank
    return [tuple(by_speed[position] for position in column) for column in slowest.T.tolist()]


def _grid(cluster: Cluster, plan: Plan) -> "np.ndarray":
    """The kind of each rank's device, by pipeline rank, data rank, and rank of the group."""
    axes = plan.axes
    kinds = cluster.kinds
    counts = tuple(
        (next(kind for kind, other in enumerate(kinds) if node.is_alike(other)), node.count * node.number)
        for node in cluster.nodes
    )
    of_ranks = np.array(_kinds_of_ranks(counts)[: plan.world_size])
    return of_ranks.reshape(axes.pipeline, plan.data_ranks, axes.context * axes.tensor)


@lru_cache(maxsize=16)
def _kinds_of_ranks(counts: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(kind for kind, ranks in counts for _ in range(ranks))

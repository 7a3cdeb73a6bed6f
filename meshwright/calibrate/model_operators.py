"""A model's own operators, measured where they will run: what a general calibration has of other shapes, this has of
the very ones, so that a look-up meets them.

    here        a cluster that is this machine, as `local` measured it; any other is left as it is        is_here
    heavy       distinct operators of a rank's share under a plan, those of the longest predicted time,
                as many as a budget allows                                                                 _heavy
    acted out   in the order of the step, with as many threads as the rank has, while the other ranks of
                this machine do the same: forward results are kept until the backward pass wants them      _pass
    waited      all begin a pass together, and it lasts until the slowest has done                       _on_cores
    rows        the median of the passes as `OperatorTime`, of one core: as if each thread had taken all of it  _row

In a loop of its own an operator finds its memory and its inputs where it left them; in a step it does not, and what
the system takes to hand out memory anew counts. On two cores of a server a loop made convolutions up to twice as slow
or as fast as they are in a step.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from meshwright.calibrate.operator_calls import Act, Builder, Scene
from meshwright.calibrate.timing import device_seconds
from meshwright.cluster.cluster import Cluster, Device, Node, OperatorTime
from meshwright.cluster.detect import detect, detect_cpu
from meshwright.dtypes import Dtype, float32_products
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile, Operator
from meshwright.simulator.compute.engine_profile import run_by
from meshwright.simulator.compute.lookup import STAND_INS, LookedUp, looked_up, measured_as
from meshwright.simulator.compute.operator_time import Speeds, operator_s, speeds
from meshwright.simulator.compute.passes import products_in
from meshwright.simulator.engine import find_engine
from meshwright.simulator.tensor.branches import around, unsplit
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.simulator.tensor.standalone_splits import with_lone

BASED_ON = "measured here, with the model's own shapes"
BUDGET_S = 3.0
MOST_PASSES, FEWEST_PASSES = 9, 3
LEAST_SHARE = 2e-3  # of a step: operators that take less are not worth a row
_OF_MEMORY = 0.25  # of a device's, what inputs and results may take
_IMAGES = ("convolution", "batch_norm", "pooling")


@dataclass(frozen=True)
class _Heavy:
    operator: Operator
    backward: bool
    found: LookedUp
    act: Act


@dataclass(frozen=True)
class _Rank:
    """One of the ranks that this machine runs at once. Its device is one core, of which it has `cores`."""

    device: Device
    cores: int
    ranks: int
    channels_last: bool
    prices: Speeds
    tf32: bool

    @property
    def where(self) -> torch.device:
        return torch.device(self.device.kind)

    @property
    def layout(self) -> str:
        return "channels_last" if self.channels_last else "contiguous"


def with_own_shapes(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, budget_s: float = BUDGET_S
) -> Cluster:
    """The cluster with rows of the operators that a rank runs under this plan, where it is this machine. It takes about
    `budget_s`, and leaves random numbers and threads as they were."""
    if not is_here(cluster):
        return cluster
    (node,) = cluster.nodes
    batch = max(1, round(global_batch / plan.shares))
    run = run_by(with_lone(profile, plan), find_engine("meshwright"))
    part = split_profile(unsplit(run, plan), around(run, plan))  # branches of all ranks
    rank = _rank(node, plan)
    heavy = _heavy(part, batch, rank, budget_s)
    if not heavy:
        return cluster
    taken = _on_gpu(heavy, rank) if node.device.kind == "cuda" else _on_cores(heavy, rank, budget_s)
    rows = tuple(_rows(heavy, taken, batch, rank))
    device = node.device.model_copy(
        update={
            "operators": _joined(node.device.operators, rows),
            "sources": {**node.device.sources, "operators": BASED_ON},
        }
    )
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),), "based_on": BASED_ON})


def is_here(cluster: Cluster) -> bool:
    """Whether it is this machine, measured: by its name and by what there is. A GPU needs a calibration of its own to
    add to."""
    node = cluster.nodes[0]
    named = cluster.name == "local" or cluster.name.lower().endswith("cpu")
    if not named or cluster.based_on in ("detected", "datasheet") or len(cluster.nodes) > 1 or node.number > 1:
        return False
    if not node.device.operators or (node.device.kind == "cuda" and not torch.cuda.is_available()):
        return False
    (own,) = (detect() if node.device.kind == "cuda" else detect_cpu()).nodes
    return own.device.name == node.device.name and own.cores == node.cores


def _rank(node: Node, plan: Plan) -> _Rank:
    ranks, cores = min(plan.world_size, node.count), 1
    if node.device.kind == "cpu":
        cores = plan.compute.threads or max(1, node.cores // ranks)
    precision, layout = plan.numerics.precision, plan.compute.layout
    prices = speeds(node.device, products_in(precision), cores, layout)
    return _Rank(node.device, cores, ranks, layout == "channels_last", prices, precision == "tf32")


# ---- which


def _heavy(profile: ModelProfile, batch: int, rank: _Rank, budget_s: float) -> list[_Heavy]:
    """In the order of the step."""
    builder = Builder(batch, biased=rank.device.kind == "cpu")
    built: dict[tuple[object, ...], tuple[_Heavy, float, float]] = {}  # with their seconds, once and in the whole step
    for stretch in profile.stretches:
        backward = stretch.phase == "backward"
        for operator in stretch.operators:
            found = looked_up(operator, batch, 1.0, backward)
            act = builder.build(operator, backward) if found else None
            if found is None or act is None:
                continue
            key: tuple[object, ...] = (found, backward, operator.name, operator.dtype)
            once = operator_s(operator, batch, rank.prices, backward, rank.tf32)
            one, _, total = built.get(key, (_Heavy(operator, backward, found, act), once, 0.0))
            built[key] = (one, once, total + stretch.count * once)
    step = sum(total for *_, total in built.values())
    left_s, left_bytes = budget_s / (FEWEST_PASSES + 1), _OF_MEMORY * rank.device.memory_bytes
    chosen: set[tuple[object, ...]] = set()
    for place, (one, once, total) in sorted(built.items(), key=lambda item: -item[1][2]):
        if total < LEAST_SHARE * step:
            break
        if once <= left_s and one.found.bytes <= left_bytes:
            left_s, left_bytes = left_s - once, left_bytes - one.found.bytes
            chosen.add(place)
    return [one for key, (one, *_) in built.items() if key in chosen]


# ---- how long


def _on_gpu(heavy: Sequence[_Heavy], rank: _Rank) -> list[float]:
    scene, found = Scene(rank.where, rank.channels_last), []
    with torch.random.fork_rng(), torch.no_grad():
        for one in heavy:
            with float32_products(_dtype(one.operator, rank)):
                found.append(device_seconds([lambda act=one.act: act(scene)], rank.where, 0.01))  # type: ignore[misc]
    return found


def _on_cores(heavy: Sequence[_Heavy], rank: _Rank, budget_s: float) -> list[float]:
    """The median of passes, after one that sets up. The ranks of this machine begin each together, and the slowest ends
    it: a step waits for all of them."""
    before, end = torch.get_num_threads(), time.perf_counter() + budget_s
    together, over = threading.Barrier(rank.ranks), threading.Event()
    neighbours = [_Neighbour(heavy, rank, together, over) for _ in range(rank.ranks - 1)]
    passes: list[list[float]] = []
    try:
        torch.set_num_threads(rank.cores)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            scene = Scene(rank.where, rank.channels_last)
            _pass(heavy, scene)
            scene.settle()
            for neighbour in neighbours:
                neighbour.start()
            while len(passes) < FEWEST_PASSES or (len(passes) < MOST_PASSES and time.perf_counter() < end):
                together.wait()
                passes.append(_pass(heavy, scene))
                together.wait()  # before anybody is told that it was the last
            over.set()
            together.wait()
    finally:
        if not over.is_set():
            over.set()
            together.abort()
        for neighbour in neighbours:
            if neighbour.is_alive():
                neighbour.join()
        torch.set_num_threads(before)
    slowest = [max(taken) for taken in zip(map(sum, passes), *(one.taken for one in neighbours), strict=True)]
    waited = [[one * longest / sum(own) for one in own] for own, longest in zip(passes, slowest, strict=True)]
    return [median(taken) for taken in zip(*waited, strict=True)]


class _Neighbour(threading.Thread):
    """Another rank, that keeps its cores as busy; `taken` are the seconds of its passes."""

    def __init__(
        self, heavy: Sequence[_Heavy], rank: _Rank, together: threading.Barrier, over: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._heavy, self._rank, self._together, self._over = heavy, rank, together, over
        self.taken: list[float] = []

    def run(self) -> None:
        torch.set_num_threads(self._rank.cores)
        scene = Scene(self._rank.where, self._rank.channels_last)
        try:
            with torch.no_grad():
                while True:
                    self._together.wait()
                    if self._over.is_set():
                        return
                    self.taken.append(sum(_pass(self._heavy, scene)))
                    self._together.wait()
        except BaseException:
            self._together.abort()  # nobody shall wait for one that is gone
            raise


def _pass(heavy: Sequence[_Heavy], scene: Scene) -> list[float]:
    """Seconds of each, with what giving back its inputs takes."""
    kept = scene.kept
    back = sum(one.backward for one in heavy)
    taken, forward, done = [], len(heavy) - back, 0
    mark = time.perf_counter()
    for one in heavy:
        result = one.act(scene)
        scene.put(result)
        if one.backward:
            done += 1
            del kept[round(forward * (1 - done / back)) :]
        elif one.operator.name.startswith("relu") and kept:
            kept[-1] = result  # which is all that its backward pass needs
        else:
            kept.append(result)
        del result
        now = time.perf_counter()
        taken.append(now - mark)
        mark = now
    scene.clear()
    taken[-1] += time.perf_counter() - mark
    return taken


# ---- as rows


def _dtype(operator: Operator, rank: _Rank) -> Dtype:
    """As operators.py looks it up."""
    types: dict[str, Dtype] = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    found = types.get(operator.dtype, "fp32")
    shorter = rank.tf32 and operator.kind in ("convolution", "matmul", "attention")
    return "tf32" if found == "fp32" and shorter and "tf32" in rank.prices.rates else found


def _rows(heavy: Sequence[_Heavy], taken: Sequence[float], batch: int, rank: _Rank) -> Iterator[OperatorTime]:
    """Operators that are looked up alike are one row, of their mean."""
    alike: dict[object, tuple[OperatorTime, list[float]]] = {}
    for one, seconds in zip(heavy, taken, strict=True):
        row = _row(one, seconds, batch, rank)
        key = (row.direction, row.dtype, row.layout, *measured_as(row))
        alike.setdefault(key, (row, []))[1].append(seconds * rank.cores)
    for row, several in alike.values():
        yield row.model_copy(update={"seconds": sum(several) / len(several)})


def _row(one: _Heavy, seconds: float, batch: int, rank: _Rank) -> OperatorTime:
    found, name = one.found, one.found.name
    sizes = [max(1, round(size.at(batch))) for size in one.operator.shape]
    if name.startswith("matmul"):
        # Rows that are no multiple of eight numbers are a class of their own: this is of it only if it is looked up so.
        sizes = [
            size if name.endswith(side) else -(-size // 8) * 8 for side, size in zip("mnk", sizes[1:], strict=True)
        ]
    elif name.endswith("_gradient"):
        sizes = sizes[1:]
    elif name == "attention":
        sizes = [*sizes[:3], sizes[4]]
    elif name == "batch_norm":
        sizes = [1, max(1, round(2 ** found.sizes[1])), 1, 1]
    elif name not in ("batched_matmul", "convolution"):
        sizes = sizes[:1]
    return OperatorTime.model_validate(
        {
            "operator": "norm" if name == "batch_norm" else name.partition(" ")[0],
            "direction": "backward" if one.backward else "forward",
            "dtype": _dtype(one.operator, rank),
            "shape": sizes,
            "layout": rank.layout if name in _IMAGES else "contiguous",
            "flops": found.flops,
            "bytes": found.bytes,
            "seconds": seconds,
        }
    )


def _joined(known: tuple[OperatorTime, ...], own: tuple[OperatorTime, ...]) -> tuple[OperatorTime, ...]:
    """What was measured of other shapes stands beside them: a class that was only measured forward, or in one layout,
    is first copied, so that a few own shapes do not stand for all; without any it takes none."""
    rows = list(known)
    for row in own:
        key = _class(row)
        if not any(_class(other) == key for other in rows):
            name, _, dtype, _ = key
            alike = [other for other in known if other.dtype == dtype]
            like = [other for other in alike if _class(other)[0] == name]
            like = like or [other for other in alike if _class(other)[0] == STAND_INS.get(name)]
            like = [other for other in like if other.direction == row.direction] or like
            like = [other for other in like if other.layout == row.layout] or like
            same = {"operator": row.operator, "direction": row.direction, "layout": row.layout}
            rows += [other.model_copy(update=same) for other in like]
            if not like:
                continue
        rows.append(row)
    return tuple(rows)


def _class(row: OperatorTime) -> tuple[str, str, str, str]:
    return measured_as(row)[0], row.direction, row.dtype, row.layout

"""Plain plans: what a person would write without a planner. They are replicas (DDP), shards (FSDP2, at the best level
of sharding) and replicas of shards (hybrid FSDP), each over all devices and with the fields of `compute` that suit it
best, as the search has found them."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.numbers.units import bytes_text
from meshwright.planner.explanation.rejected import Rejected
from meshwright.planner.search_result import PricedPlan, SearchResult

_NAMES: dict[tuple[str, ...], str] = {
    ("replicate",): "plain DDP",
    ("shard",): "plain FSDP",
    ("replicate", "shard"): "hybrid FSDP",
}
_ALWAYS_NAMED = ("plain FSDP", "plain DDP")
_AS_FAST = 0.005  # two steps whose ratio is rounded to 1.00


@dataclass(frozen=True)
class PlainPlan:
    """A plain plan beside the best one. `times` is how many times as fast the best plan is; None if the plain one does
    not fit, because it needs `too_large_bytes` of a device. `is_best` says that the best plan is of this kind."""

    name: str
    priced: PricedPlan | None
    times: float | None
    too_large_bytes: float | None = None
    is_best: bool = False

    @property
    def words(self) -> str:
        if self.is_best:
            return f"this is {self.name}"
        if self.times is None:
            return f"{self.name} does not fit: it needs {bytes_text(self.too_large_bytes or 0.0)}"
        if abs(self.times - 1) < _AS_FAST:
            return f"as fast as {self.name}"
        digits = f"{self.times:.2f}" if self.times < 10 else f"{self.times:,.0f}"
        return f"{digits} times as fast as {self.name}"


def plain_plans(result: SearchResult, rejected: tuple[Rejected, ...]) -> tuple[PlainPlan, ...]:
    """The plain plans beside the best plan: that of its own kind first, then the others. Kinds of which there is no
    plan on these devices, or which the constraints exclude, are left out."""
    best = result.ranked[0]
    found = list(_plain_plans(result, best, rejected))
    return tuple(sorted(found, key=lambda plain: not plain.is_best))


def _plain_plans(result: SearchResult, best: PricedPlan, rejected: tuple[Rejected, ...]) -> Iterator[PlainPlan]:
    by_family = {priced.candidate.sizes.family: priced for priced in result.plain}
    too_large = {item.family: item.too_large_bytes for item in rejected if item.too_large_bytes is not None}
    for family in sorted(_NAMES, key=lambda family: _order(_NAMES[family])):
        name, priced = _NAMES[family], by_family.get(family)
        if best.candidate.sizes.family == family:
            yield PlainPlan(name, best, 1.0, is_best=True)
        elif priced is not None:
            yield PlainPlan(name, priced, priced.prediction.step_s / best.prediction.step_s)
        elif family in too_large and name in _ALWAYS_NAMED:
            yield PlainPlan(name, None, None, too_large[family])


def _order(name: str) -> int:
    return _ALWAYS_NAMED.index(name) if name in _ALWAYS_NAMED else len(_ALWAYS_NAMED)

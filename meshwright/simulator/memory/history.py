"""The memory of a rank over one step, and what is in memory at the peak.

    without a pipeline   every change of memory of one microbatch (the last one), then the optimizer step
    with a pipeline      the most bytes of every action of the timeline, then the optimizer step

The largest point of a history is the peak that peak.py predicts. Times are those of the operators, or of the actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshwright.blocks.module_names import is_inside
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import MemoryChange, ModelProfile, Operator, TraceSegment
from meshwright.simulator.memory.device_memory import DeviceMemory
from meshwright.simulator.memory.peak import RankReplay, RankStages, action_peaks, live_by_kind, rank_works, replay_rank
from meshwright.simulator.memory.replay import LiveBytes
from meshwright.simulator.pipeline.timeline import Timeline

OperatorSeconds = Callable[[Operator, bool], float]  # of an operator, in the backward pass if the flag is True


@dataclass(frozen=True)
class MemoryPoint:
    """The bytes in memory by kind (as in `MemoryPrediction.breakdown`) at `at_s` seconds after the start of the step,
    while the part of the step named `where` runs."""

    at_s: float
    where: str
    bytes_by_kind: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class MemoryHistory:
    """The memory of one rank over a step. `alive_at_peak` has the bytes of activations and temporaries that are in
    memory at the peak, by the layer that allocated them and by role; it is empty with a pipeline."""

    points: tuple[MemoryPoint, ...]
    alive_at_peak: tuple[tuple[str, str, float], ...]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.points, key=lambda point: point.total_bytes)


def memory_histories(
    profile: ModelProfile,
    plan: Plan,
    batch: float,
    optimizer: OptimizerCost,
    device: DeviceMemory,
    operator_s: OperatorSeconds,
    timeline: Timeline | None,
    most_points: int = 400,
) -> list[MemoryHistory]:
    """The history of each pipeline rank; if ranks hold different branches, of each rank of the tensor axis. Points
    beyond `most_points` are left out, but never the peak. `timeline` is that of the prediction."""
    histories = []
    for rank, work in enumerate(rank_works(profile, plan, batch)):
        recorder = _Recorder(profile, operator_s)
        observe = recorder.observe if timeline is None else None
        replayed = replay_rank(work, plan, batch, optimizer, device, observe=observe)
        if timeline is None:
            moments = [(at_s, where, replayed.earlier.plus(live)) for at_s, where, live in recorder.moments]
        else:
            moments = _action_moments(work, replayed, timeline, rank, batch)
        end_s = moments[-1][0] if moments else 0.0
        moments.append((end_s, "optimizer step", replayed.optimizer))
        kept = _thinned(moments, most_points)
        points = tuple(
            MemoryPoint(at_s, where, live_by_kind(live, replayed, plan, batch, optimizer, device))
            for at_s, where, live in kept
        )
        histories.append(MemoryHistory(points, recorder.alive_at_peak()))
    return histories


_Moment = tuple[float, str, LiveBytes]


class _Recorder:
    """Records the changes of memory of both passes with their times, and the tensors that are alive at the peak."""

    def __init__(self, profile: ModelProfile, operator_s: OperatorSeconds) -> None:
        self.moments: list[_Moment] = []
        self._operator_s = operator_s
        self._blocks = {segment.unit: segment.blocks for segment in profile.segments if len(segment.blocks) > 1}
        self._ends: dict[int, list[float]] = {}
        self._segment: TraceSegment | None = None
        self._begin_s, self._last_place = 0.0, 0
        self._alive: dict[tuple[str, str], float] = {}
        self._peak_bytes = 0.0
        self._peak_alive: dict[tuple[str, str], float] = {}

    def observe(self, segment: TraceSegment, change: MemoryChange, size: float, live: LiveBytes) -> None:
        """Records a change of memory."""
        ends = self._operator_ends(segment)
        is_next_block = self._segment is segment and change.after_operators < self._last_place
        if self._segment is not None and (self._segment is not segment or is_next_block):
            self._begin_s += self._operator_ends(self._segment)[-1]
        self._segment, self._last_place = segment, change.after_operators
        at_s = self._begin_s + ends[min(change.after_operators, len(ends) - 1)]
        self.moments.append((at_s, f"{segment.phase} of {change.layer or 'the model'}", live))
        if change.role != "gradient":
            key = (self._layer_name(change.layer), change.role)
            self._alive[key] = self._alive.get(key, 0.0) + size
        if live.total() > self._peak_bytes:
            self._peak_bytes, self._peak_alive = live.total(), dict(self._alive)

    def _layer_name(self, layer: str) -> str:
        """The name of a layer; for one of several equal blocks, which are recorded under the name of the first, with
        the names of the first and of the last."""
        for unit, blocks in self._blocks.items():
            if is_inside(layer, unit):
                return f"{unit} to {blocks[-1]}{layer.removeprefix(unit).replace('.', ': ', 1)}"
        return layer

    def _operator_ends(self, segment: TraceSegment) -> list[float]:
        """For each number of operators, the seconds from the start of the segment until so many of them have run."""
        if id(segment) not in self._ends:
            backward = segment.phase == "backward"
            seconds = (operator.runs * self._operator_s(operator, backward) for operator in segment.operators)
            self._ends[id(segment)] = [0.0, *accumulate(seconds)]
        return self._ends[id(segment)]

    def alive_at_peak(self) -> tuple[tuple[str, str, float], ...]:
        alive = [(layer, role, size) for (layer, role), size in self._peak_alive.items() if size > 0]
        return tuple(sorted(alive, key=lambda item: -item[2]))


def _action_moments(
    work: RankStages, replayed: RankReplay, timeline: Timeline, rank: int, batch: float
) -> list[_Moment]:
    actions, starts, ends = timeline.order[rank], timeline.starts_s[rank], timeline.ends_s[rank]
    peaks = action_peaks(work.stages, replayed.passes, actions, batch, replayed.earlier)
    moments: list[_Moment] = []
    for (stage, microbatch, kind), start_s, end_s, peak in zip(actions, starts, ends, peaks, strict=True):
        where = f"{kind.replace('_', ' ')} of microbatch {microbatch} on stage {stage}, at {peak.where}"
        moments += [(start_s, where, peak.live), (end_s, where, peak.live)]
    return moments


def _thinned(moments: Sequence[_Moment], most: int) -> list[_Moment]:
    """At most about `most` moments in their order: the one with most bytes of every range of equal length."""
    length = max(1, -(-len(moments) // most))
    ranges = (moments[begin : begin + length] for begin in range(0, len(moments), length))
    return [max(part, key=lambda moment: moment[2].total()) for part in ranges]

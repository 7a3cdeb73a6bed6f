"""What other sources' rows say of an engine's pace: two factors for a case, always without its own source and its kin.

    launch  = measured / predicted where the host is waited for: the median over sources, in logarithms     `_launches`
    compute = measured / predicted elsewhere, expected from rows that share something with the case         `_expected`

`compute` is that of a regression in logarithms in which what two rows share makes them alike. Of every `TRAITS` that
both have, the same variance is shared; what rows of one source share besides, strangers do not. One row says little,
several sources that agree say nearly all, and where there is nothing alike the predictor's own word stands:

    K(a, b)   = SHARED² · (1 + traits that a and b share) + SOURCE² where of one source + ROW² where the same
    ln factor = k(case, rows) · K(rows, rows)⁻¹ · ln(measured / predicted)

The three are round numbers, not fitted: how much two runs of the same kind are found to differ. Rows that are alike in
every trait are one row, their median. No voice have rows further off than `_LIMIT`, which tell of something else, and
those whose own source says not to trust them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

import numpy as np
import numpy.typing as npt

from meshwright.bench.predictions.predict import Predicted, generation
from meshwright.bench.runs.case import Case
from meshwright.bench.runs.hardware import device_of
from meshwright.bench.runs.kin import kin_of, untrusted

Traits = tuple[str, ...]
_HOST_SHARE = 0.1
_LIMIT = 2.0
SHARED, SOURCE, ROW = 0.1, 0.2, 0.1
_KINDS = {
    "megatron": ("megatron", "megatron-deepspeed", "deepspeed"),
    "megatron-core": ("megatron-core", "nemo", "maxtext"),
    "fsdp": ("torchtitan", "torchtune", "llm-foundry", "fms-fsdp"),
    "graphs": ("tensorflow", "paddle", "mxnet", "caffe2"),
    "eager": ("pytorch", "pytorch-gloo", "nvidia-examples", "nvidia-bert", "mmsegmentation", "detectron"),
}
_MODELS = {"tokens": "decoder", "words": "bert", "spans": "bert"}


@dataclass(frozen=True)
class Factors:
    """`rows` and `sources` are how many stood behind the first and share at least one trait with the case."""

    compute: float
    launch: float
    rows: int
    sources: int


@dataclass(frozen=True)
class _Voice:
    source: str
    traits: Traits
    ratio: float


def kind_of(engine: str) -> str:
    return next((kind for kind, names in _KINDS.items() if engine in names), engine)


def traits(case: Case) -> Traits:
    """The kind of engine; the GPU and its generation; the kind of model and its width, on it and anywhere; all of
    these together; the very model, of those that have no sizes to choose."""
    model = _MODELS.get(case.sample.kind, case.sample.kind)
    width = "half" if case.precision in ("bf16", "fp16") else case.precision
    kind, made = kind_of(case.engine), generation(case.cluster)
    what = f"{kind} {model} {width} {case.plan.compute.layout}"
    name = str(case.model.arguments.get("model_name", ""))
    which = model if model == "decoder" else f"{case.model.call} {name} {case.sample.size}"
    return (kind, made, device_of(case.cluster).name, f"{model} {width}", f"{model} {width} {made}", what,
            f"{what} {made}", which)  # fmt: skip


def fit(known: Sequence[Predicted]) -> dict[str, Factors]:
    """By the case's id. `known` were predicted without any factor."""
    found: dict[str, Factors] = {}
    for source in {one.case.source for one in known}:
        kin = kin_of(source)
        others = [one for one in known if one.case.source not in kin and one.case.source not in untrusted()]
        voices = _voices(one for one in others if not _bound(one))
        weights = _weights(voices)
        launches = _launches(one for one in others if _bound(one))
        for one in known:
            if one.case.source == source:
                mine = traits(one.case)
                near = [voice for voice in voices if _shared(mine, voice.traits)]
                compute = exp(float(_likeness(mine, voices) @ weights)) if voices else 1.0
                launch = launches.get(kind_of(one.case.engine), 1.0)
                found[one.case.id] = Factors(compute, launch, len(near), len({voice.source for voice in near}))
    return found


def _bound(one: Predicted) -> bool:
    return one.breakdown["launch"] > _HOST_SHARE * one.step_s


def _ratio(one: Predicted) -> float:
    assert one.case.step_s is not None
    return log(one.case.step_s / one.step_s)


def _voices(known: Iterable[Predicted]) -> list[_Voice]:
    sets: dict[tuple[str, Traits], list[float]] = defaultdict(list)
    for one in known:
        if abs(ratio := _ratio(one)) < log(_LIMIT):
            sets[one.case.source, traits(one.case)].append(ratio)
    return [_Voice(source, shared, median(ratios)) for (source, shared), ratios in sets.items()]


def _shared(one: Traits, other: Traits) -> int:
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def _likeness(mine: Traits, voices: Sequence[_Voice]) -> npt.NDArray[np.float64]:
    return SHARED**2 * np.array([1.0 + _shared(mine, voice.traits) for voice in voices])


def _weights(voices: Sequence[_Voice]) -> npt.NDArray[np.float64]:
    alike = np.array([_likeness(voice.traits, voices) for voice in voices]).reshape(len(voices), len(voices))
    same = np.array([[one.source == other.source for other in voices] for one in voices], dtype=np.float64)
    noise = SOURCE**2 * same.reshape(alike.shape) + ROW**2 * np.eye(len(voices))
    found: npt.NDArray[np.float64] = np.linalg.solve(alike + noise, np.array([voice.ratio for voice in voices]))
    return found


def _launches(known: Iterable[Predicted]) -> dict[str, float]:
    """A host's pace is its program's, whatever the GPU: by kind of engine. A single source is believed by half."""
    sets: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in known:
        if abs(ratio := _ratio(one)) < log(_LIMIT):
            sets[kind_of(one.case.engine)][one.case.source].append(ratio)
    medians = {kind: [median(ratios) for ratios in sources.values()] for kind, sources in sets.items()}
    return {kind: exp(median([*told, 0.0]) if len(told) > 1 else told[0] / 2) for kind, told in medians.items()}

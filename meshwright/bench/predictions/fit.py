"""What other sources' rows say of an engine's pace: two factors for a case, always without its own source and its kin.

    launch  = measured / predicted where the host is waited for                                     `_bound`
    compute = measured / predicted elsewhere
    factor  = median over sources (and a voice of 1, for the predictor itself) of the source's median, in logarithms,
              from the nearest set of rows that has any                                             `keys`

The sets, the nearest first: the same kind of engine, precision and layout, and the same model (of those that have no
sizes to choose), on the same GPU; any model of its kind; the same generation of GPUs; any engine on it; the same kind
of engine on any GPU; any at all. In the first the predictor itself has no voice.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from meshwright.bench.predictions.predict import Predicted, generation
from meshwright.bench.runs.case import Case
from meshwright.bench.runs.hardware import device_of
from meshwright.bench.runs.kin import kin_of

Key = tuple[str, ...]
_HOST_SHARE = 0.1
_SAME_MODEL = "same model"
_LIMIT = 3.0  # a row further off than this tells of something else
_KINDS = {
    "megatron": ("megatron", "megatron-deepspeed", "deepspeed"),
    "megatron-core": ("megatron-core", "nemo", "maxtext"),
    "fsdp": ("torchtitan", "torchtune", "llm-foundry", "fms-fsdp"),
    "graphs": ("tensorflow", "paddle", "mxnet", "caffe2"),
    "eager": ("pytorch", "pytorch-gloo", "nvidia-examples", "mmsegmentation", "detectron"),
}
_MODELS = {"tokens": "decoder", "words": "bert", "spans": "bert"}


@dataclass(frozen=True)
class Factors:
    """`sources` is how many stood behind the first, `key` the set they were taken from."""

    compute: float
    launch: float
    key: Key
    sources: int


def kind_of(engine: str) -> str:
    return next((kind for kind, names in _KINDS.items() if engine in names), engine)


def keys(case: Case) -> tuple[Key, ...]:
    model = _MODELS.get(case.sample.kind, case.sample.kind)
    width = "half" if case.precision in ("bf16", "fp16") else case.precision
    what, kind = (model, width, case.plan.compute.layout), kind_of(case.engine)
    made = generation(case.cluster)
    device = device_of(case.cluster).name
    nearest = (
        () if model == "decoder" else ((_SAME_MODEL, kind, *what, device, case.model.call, str(case.sample.size)),)
    )
    return (
        *nearest,
        (kind, *what, device),
        (kind, *what, made),
        (model, width, made),
        (kind, *what),
        (model, width),
        (),
    )


def _of_engine(case: Case) -> Key:
    """A host's pace is its program's, whatever the GPU."""
    return keys(case)[-3]


def fit(known: Sequence[Predicted]) -> dict[str, Factors]:
    """By the case's id. `known` were predicted without any factor."""
    found: dict[str, Factors] = {}
    for source in {one.case.source for one in known}:
        kin = kin_of(source)
        others = [one for one in known if one.case.source not in kin and one.case.step_s]
        device = _voices(one for one in others if not _bound(one))
        host = _voices(one for one in others if _bound(one))
        for one in known:
            if one.case.source == source:
                key, voices = _nearest(device, one.case)
                waited = host.get(_of_engine(one.case), [])
                compute = exp(median(voices)) if key and key[0] == _SAME_MODEL else _factor(voices)
                found[one.case.id] = Factors(compute, _factor(waited), key, len(voices))
    return found


def _bound(one: Predicted) -> bool:
    return one.breakdown["launch"] > _HOST_SHARE * one.step_s


def _voices(known: Iterable[Predicted]) -> dict[Key, list[float]]:
    """By set of rows, the median of each source."""
    sets: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in known:
        assert one.case.step_s is not None
        ratio = log(one.case.step_s / one.step_s)
        if abs(ratio) < log(_LIMIT):
            for key in keys(one.case):
                sets[key][one.case.source].append(ratio)
    return {key: [median(ratios) for ratios in sources.values()] for key, sources in sets.items()}


def _nearest(voices: dict[Key, list[float]], case: Case) -> tuple[Key, list[float]]:
    return next(((key, voices[key]) for key in keys(case) if key in voices), ((), []))


def _factor(voices: list[float]) -> float:
    """Where several sources agree, the predictor's own voice hardly counts; a single one is believed by half."""
    if not voices:
        return 1.0
    return exp(median([*voices, 0.0]) if len(voices) > 1 else voices[0] / 2)

"""`Job`: what to train. The user's YAML file as a frozen value, and the one line a mistake in it deserves."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from yaml import YAMLError

from meshwright.call import Call
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.yaml_file import dump, parse, read_mapping, validated


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(_Section):
    """`root`, `synthetic` and `damaged` are handed to the data sets that take them."""

    train: Call
    eval: Call | None = None
    root: str | None = None
    synthetic: bool = False
    partition: Literal["batch", "sample", "dimension"] = "batch"
    parts: PositiveInt | None = None  # of the data set, divided by sample; null: one a rank
    workers: NonNegativeInt = 0
    pin_memory: bool | None = None  # null: where there are GPUs
    collate: Call | None = None
    target: str | None = None  # the target's key in batches that are dicts; null: target(s) or label(s)
    drop_last: bool = False
    damaged: Literal["fatal", "skip"] = "fatal"  # a sample whose file cannot be read: handed to those that take it


class Optimizer(Call):
    """`groups`: the word `no_decay` (no weight decay on norms and biases), or a list of that word and of
    `{match: "head.*", lr: 0.1}`; the first match wins."""

    groups: Literal["no_decay"] | list[Literal["no_decay"] | dict[str, Any]] = Field(default_factory=list)


class Schedule(Call):
    """Stepped after every optimizer step or epoch; null: per epoch where the job counts epochs."""

    per: Literal["step", "epoch"] | None = None


_HINTS = {kind.__name__: ": write {call: package.module:name, ...}" for kind in (Call, Optimizer, Schedule)}


class Weights(_Section):
    """Pretrained weights to start from; parameters that match `skip` keep their fresh values."""

    path: str
    skip: list[str] = []


class Train(_Section):
    """The run ends after `epochs` or `steps`, whichever comes first."""

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    global_batch: PositiveInt = 128
    clip_norm: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    weights: Weights | None = None
    freeze: list[str] = []
    deterministic: bool = False
    timeout_s: PositiveFloat = 600  # how long a rank waits for the others
    restarts: NonNegativeInt = 3  # how often failed ranks are started again
    grace_s: PositiveFloat = 30  # how long ranks may take to save when asked to stop

    @model_validator(mode="before")
    @classmethod
    def _weights_may_be_a_path(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("weights"), str):
            return {**raw, "weights": {"path": raw["weights"]}}
        return raw


class Checkpoint(_Section):
    """`best` names the metric that chooses the best checkpoint; its `better` is `lower` or `higher`
    (null: lower for losses and errors)."""

    every_steps: PositiveInt | None = 100
    keep: PositiveInt = 3
    best: str | None = None
    better: Literal["lower", "higher"] | None = None


class Log(_Section):
    """`eval_every_steps: null` evaluates after every epoch and at the end."""

    every_steps: PositiveInt = 10
    eval_every_steps: PositiveInt | None = None
    tensorboard: bool = True


class Job(_Section):
    """`synthetic`: fields by their dotted names, and what `data.synthetic: true` makes of them, so that a job for a
    cluster can be tried on a small machine."""

    name: str = Field(default="job", pattern=r"^[\w.-]+$")  # runs are folders of this name
    model: Call
    data: Data
    loss: Call | None = None  # null: the model returns its own loss
    metrics: dict[str, Call] = {}
    optimizer: Optimizer
    schedule: Schedule | None = None
    train: Train = Train(epochs=1)
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    plan: Literal["auto"] | Plan = "auto"
    cluster: str = "local"
    output: str = "runs"
    synthetic: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.train.epochs is None and self.train.steps is None:
            raise ValueError("train needs 'epochs' or 'steps': how long shall it train?")
        if self.data.parts is not None and self.data.partition != "sample":
            raise ValueError(
                f"data.parts is {self.data.parts}, into which data.partition: sample divides the data set, but that is"
                f" {self.data.partition}: leave one of them out"
            )
        if "loss" in self.metrics:
            raise ValueError("metrics.loss: evaluations measure the loss already under this name, choose another")
        best = self.checkpoint.best
        if best and best != "loss" and best not in self.metrics:
            raise ValueError(
                f"checkpoint.best is '{best}', but metrics has no such one{did_you_mean(best, self.metrics)}"
            )
        if best and self.data.eval is None:
            raise ValueError(f"checkpoint.best is '{best}', but data.eval is missing, on which it is measured")
        return self

    def to_yaml(self) -> str:
        return dump(self.model_dump())


def load_job(path: str | Path, settings: Sequence[str] = ()) -> Job:
    """Reads a job file and applies `--set a.b=c` overrides."""
    file = Path(path)
    raw = read_mapping(file, "job")
    raw.setdefault("name", re.sub(r"[^\w.-]", "-", file.stem))
    for setting in settings:
        _override(raw, setting)
    _make_small(raw, {setting.partition("=")[0] for setting in settings})
    return parse_job(raw, folder=file.parent, source=str(path))


def parse_job(raw: Mapping[str, Any], folder: Path = Path(), source: str = "job") -> Job:
    """A job from plain data; `folder` is where relative input files are looked for before the working folder."""
    resolved = _resolve_files(raw, folder)
    plan = resolved.get("plan", "auto")
    if plan != "auto":
        resolved["plan"] = load_plan(_find(plan, folder) if isinstance(plan, str) else plan, source)
    return validated(Job, resolved, source, hints=_HINTS)


def load_plan(plan: str | Path | Mapping[str, Any], source: str = "plan") -> Plan:
    """A plan from a YAML file or from plain data; a wrong field is named with its nearest known one."""
    if isinstance(plan, Mapping):
        return validated(Plan, dict(plan), source, prefix="plan")
    if not isinstance(plan, str | Path):
        raise InputError(f"{source}: plan is {plan!r}: write 'auto', a file, or the plan's groups")
    return validated(Plan, read_mapping(Path(plan), "plan"), str(plan))


def _override(raw: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise InputError(f"--set {setting}: write --set a.b=c")
    try:
        value = parse(text)
    except YAMLError:
        raise InputError(f"--set {setting}: '{text}' is not YAML") from None
    _put(raw, key, value, f"--set {setting}")


def _make_small(raw: dict[str, Any], settled: Collection[str]) -> None:
    """Generated data bring their own sizes with them; what was `--set` stays as it is."""
    data, smaller = raw.get("data"), raw.get("synthetic")
    if not (isinstance(data, Mapping) and data.get("synthetic") is True and isinstance(smaller, Mapping)):
        return
    for key, value in smaller.items():
        if not any(one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in settled):
            _put(raw, str(key), value, f"synthetic: {key}")
    raw["synthetic"] = {}  # done: the run's own job file says what it was


def _put(raw: dict[str, Any], key: str, value: Any, source: str) -> None:
    *path, last = key.split(".")
    section = raw
    for depth, part in enumerate(path):
        inner = section.get(part)
        if inner is None or inner == "auto":  # `plan: auto` gives way to what is set inside a plan
            inner = {}
        if not isinstance(inner, dict):
            raise InputError(f"{source}: {'.'.join(path[: depth + 1])} is {inner!r}, it has no '{last}'")
        section[part] = section = dict(inner)
    section[last] = value


def _find(path: str, folder: Path) -> str:
    """Input files of a job lie beside it or in the working folder."""
    beside = folder / path
    return str(beside.resolve()) if beside.exists() else str(Path(path).resolve())


def _resolve_files(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Makes input files absolute, so that the resolved job in the run directory works from anywhere."""
    resolved: dict[str, Any] = _resolve_calls(raw, folder)
    data, train = resolved.get("data"), resolved.get("train")
    if isinstance(data, dict) and isinstance(data.get("root"), str):
        data["root"] = _find(data["root"], folder)
    if isinstance(train, dict) and isinstance(train.get("weights"), str):
        train["weights"] = _find(train["weights"], folder)
    elif isinstance(train, dict) and isinstance(train.get("weights"), dict) and "path" in train["weights"]:
        train["weights"]["path"] = _find(str(train["weights"]["path"]), folder)
    return resolved


def _resolve_calls(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_resolve_calls(item, folder) for item in value]
    if not isinstance(value, Mapping):
        return value
    resolved = {key: _resolve_calls(item, folder) for key, item in value.items()}
    call = resolved.get("call")
    if isinstance(call, str) and ".py:" in call:
        file, _, name = call.rpartition(":")
        resolved["call"] = f"{_find(file, folder)}:{name}"
    return resolved

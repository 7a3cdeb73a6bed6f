"""`Job`: what to train, as the user's YAML file says it: model, data, loss, optimizer, length, and how to log and save.
`load_job` reads a file; a mistake in it raises an `InputError` that names the field in one line."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from yaml import YAMLError

from meshwright.errors import InputError, did_you_mean
from meshwright.files.remote import is_url
from meshwright.files.user_path import expand_home, user_path
from meshwright.files.yaml_file import dump, parse, parse_mapping, read_mapping, validate
from meshwright.numbers.limits import is_number
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import Constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.user.call import Call
from meshwright.user.job_sections import (
    Checkpoint,
    Data,
    LearningRateSchedule,
    Log,
    Optimizer,
    Section,
    Train,
    Weights,
)

_DEEPEST_FIELD = 50  # names before the last dot of a field that `--set` sets, such as an argument of a nested call
_LONGEST_TUNE_S = 1e6
_HINTS = {
    **{kind.__name__: "write {call: package.module:name, ...}" for kind in (Call, Optimizer, LearningRateSchedule)},
    Weights.__name__: "write the path of a file or a Hugging Face folder, or {path: file_or_folder, skip: [patterns]}",
}


def _check_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise PydanticCustomError(
            "name",
            "write letters, digits, '_', '.' and '-' only, and begin with a letter, a digit or '_', as folders get"
            " this name",
        )
    return name


def _check_tune(tune: Any) -> bool | float:
    if not isinstance(tune, bool) and not (is_number(tune) and 0 <= tune <= _LONGEST_TUNE_S):
        raise PydanticCustomError("tune", "write true, false, or a number of seconds up to 1,000,000")
    return tune


Tune = Annotated[bool | float, BeforeValidator(_check_tune)]


class Job(Section):
    """Everything that a job file says.

    `synthetic` maps dotted field names to the values that they take when `data.synthetic` is true, so that a job for a
    large cluster can be tried on a small machine.
    """

    name: Annotated[str, AfterValidator(_check_name)] = "job"  # runs are written to folders with this name
    model: Call
    data: Data
    loss: Call | None = None  # null: the model returns its loss
    metrics: dict[str, Call] = Field(default={})
    optimizer: Optimizer
    schedule: LearningRateSchedule | None = None
    callbacks: list[Call] = Field(default=[])  # called as the run goes on, see train/callbacks/callbacks.py
    train: Train = Train(epochs=1)
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    plan: Literal["auto"] | Plan = "auto"
    constraints: Constraints = Constraints()  # what `plan: auto` has to keep (docs/constraints.md)
    # What `plan: auto` may do to the numerical result: nothing but another order of sums, other last bits, or anything.
    allow: Numerics = "rounding"
    # How many seconds a run with `plan: auto` may first time variants of its plan; true: 60, and at most 5% of the run.
    tune: Tune = True
    cluster: str = "local"
    output: str = "runs"
    synthetic: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _sections_are_consistent(self) -> Self:
        if self.train.epochs is None and self.train.steps is None:
            raise ValueError("train needs 'epochs' or 'steps': set one of them to say how long to train")
        if self.data.parts is not None and self.data.partition != "sample":
            raise ValueError(
                f"data.parts is {self.data.parts}, which only data.partition: sample uses, but data.partition is"
                f" {self.data.partition}: leave out data.parts or set data.partition to sample"
            )
        self.data.check_sampling()
        self.data.check_timeout()
        if "loss" in self.metrics:
            raise ValueError("metrics.loss: every evaluation already reports the loss under this name, choose another")
        best = self.checkpoint.best
        scheduled = self.schedule.metric if self.schedule else None
        for field, name in (("checkpoint.best", best), ("schedule.metric", scheduled)):
            if name and name != "loss" and name not in self.metrics:
                raise ValueError(
                    f"{field} is '{name}', but metrics has no metric of this name{did_you_mean(name, self.metrics)}"
                )
        if best and self.data.eval is None:
            raise ValueError(
                f"checkpoint.best is '{best}', but data.eval is missing: name the data set to measure it on"
            )
        return self

    def to_yaml(self) -> str:
        """The job as YAML text, which `load_job` reads back."""
        return dump(self.model_dump())


def load_job(path: str | Path, settings: Sequence[str] = (), text: str | None = None) -> Job:
    """Reads a job file. `settings` are overrides such as `train.epochs=3`, applied in order (`--set`). If `text` is not
    None, it is the content of the file, which is then not read again.

    >>> import meshwright as mw
    >>> job = mw.load_job("jobs/mnist.yaml", ["train.epochs=5"])
    >>> job.name, job.train.epochs, job.train.global_batch
    ('mnist', 5, 128)
    """
    file = user_path(path, "the job file")
    raw = read_mapping(file, "job") if text is None else parse_mapping(text, file, "job")
    raw.setdefault("name", re.sub(r"[^\w.-]", "-", file.stem).lstrip(".-") or "job")
    for setting in settings:
        _override(raw, setting)
    overridden = {setting.partition("=")[0] for setting in settings}
    overridden |= _apply_sequence_to_data(raw, overridden)
    _apply_synthetic_sizes(raw, overridden)
    return parse_job(raw, folder=file.parent, source=str(path))


def parse_job(raw: Mapping[str, Any], folder: Path = Path(), source: str = "job") -> Job:
    """Returns the job that `raw` describes, which is plain data as read from YAML. Relative input files are looked for
    in `folder` first, then in the working folder. `source` is named in error messages."""
    resolved = _resolve_files(raw, folder, source)
    plan = resolved.get("plan", "auto")
    if plan != "auto":
        file = _absolute_path(plan, folder, f"{source}: plan") if isinstance(plan, str) else None
        resolved["plan"] = load_plan(file or plan, source)
    return validate(Job, resolved, source, hints=_HINTS)


def load_plan(plan: str | Path | Mapping[str, Any], source: str = "plan", text: str | None = None) -> Plan:
    """Reads a plan from a YAML file, or from a mapping of its groups. `source` is named in errors about a mapping. For
    an unknown field, the `InputError` names the most similar known field. If `text` is not None, it is the content of
    the file, which is then not read again.

    >>> import meshwright as mw
    >>> mw.load_plan({"axes": {"replicate": 4, "tensor": 2}, "numerics": {"precision": "bf16"}}).summary()
    'replicate 4 × tensor 2 · bf16'
    """
    if isinstance(plan, Mapping):
        return validate(Plan, dict(plan), source, prefix="plan")
    if not isinstance(plan, str | Path):
        raise InputError(f"{source}: plan is {plan!r}: write 'auto', a file, or the plan's groups")
    file = user_path(plan, "the plan file")
    raw = read_mapping(file, "plan") if text is None else parse_mapping(text, file, "plan")
    return validate(Plan, raw, str(plan))


def _override(raw: dict[str, Any], setting: str) -> None:
    """Sets one field of the raw job from a setting such as `train.epochs=3`."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise InputError(f"--set {setting}: write --set a.b=c")
    try:
        value = parse(text)
    except YAMLError:
        raise InputError(f"--set {setting}: '{text}' is not YAML") from None
    _set_field(raw, key, value, f"--set {setting}")


def _apply_sequence_to_data(raw: dict[str, Any], overridden: Collection[str]) -> set[str]:
    """If the user has set the length of the model's sequences, those of the data have the same length, unless the user
    has set theirs. Returns the names of the fields that have changed."""
    model, data = raw.get("model"), raw.get("data")
    if "model.sequence" not in overridden or not isinstance(model, Mapping) or not isinstance(data, Mapping):
        return set()
    changed = set()
    for name, part in data.items():
        field = f"data.{name}.sequence"
        if isinstance(part, Mapping) and "sequence" in part and field not in overridden:
            _set_field(raw, field, model["sequence"], "--set model.sequence")
            changed.add(field)
    return changed


def _apply_synthetic_sizes(raw: dict[str, Any], overridden: Collection[str]) -> None:
    """Applies the job's `synthetic` section when `data.synthetic` is true. Fields that the user has `overridden` on the
    command line keep the user's value."""
    data, sizes = raw.get("data"), raw.get("synthetic")
    if not (isinstance(data, Mapping) and data.get("synthetic") is True and isinstance(sizes, Mapping)):
        return
    for key, value in ((str(key), value) for key, value in sizes.items()):
        if not any(user == key or user.startswith(f"{key}.") or key.startswith(f"{user}.") for user in overridden):
            _set_field(raw, key, value, f"synthetic: {key}")
    raw["synthetic"] = {}  # applied: it must not be applied again when the job file in the run folder is read


def _set_field(raw: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Sets the field with a dotted name, and creates the sections that contain it if they are missing."""
    *path, last = key.split(".")
    if len(path) > _DEEPEST_FIELD:
        raise InputError(f"{source}: the field has {len(path) + 1} names between dots, more than any field of a job")
    section = raw
    for depth, part in enumerate(path):
        inner = section.get(part)
        if inner is None or inner == "auto":  # a field inside a plan replaces `plan: auto`
            inner = {}
        if not isinstance(inner, dict):
            raise InputError(f"{source}: {'.'.join(path[: depth + 1])} is {inner!r}, it has no '{last}'")
        section[part] = section = dict(inner)
    section[last] = value


def _absolute_path(path: str, folder: Path, field: str) -> str:
    """Returns the absolute path of an input file, which is looked for in the job's folder first, then in the working
    folder. `field` is named in error messages."""
    expanded = expand_home(path, field)
    try:
        in_folder = folder / expanded
        return str(in_folder.resolve()) if in_folder.exists() else str(Path(expanded).resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        raise InputError(f"{field} is '{path}', which cannot be read: {getattr(error, 'strerror', error)}") from None


def _resolve_files(raw: Mapping[str, Any], folder: Path, source: str) -> dict[str, Any]:
    """Makes the paths of input files absolute, so that the job file in the run folder works from any working folder,
    and replaces `~` in all paths."""
    resolved: dict[str, Any] = _resolve_calls(raw, folder, source)
    data, train = resolved.get("data"), resolved.get("train")
    if isinstance(data, dict) and isinstance(data.get("root"), str) and not is_url(data["root"]):
        data["root"] = _absolute_path(data["root"], folder, f"{source}: data.root")
    if isinstance(data, dict) and isinstance(data.get("weights"), str):
        data["weights"] = _absolute_path(data["weights"], folder, f"{source}: data.weights")
    if isinstance(train, dict):
        weights = train.get("weights")
        section, key = (weights, "path") if isinstance(weights, dict) else (train, "weights")
        if isinstance(section.get(key), str):
            section[key] = _absolute_path(section[key], folder, f"{source}: train.weights")
    if isinstance(resolved.get("output"), str):
        resolved["output"] = expand_home(resolved["output"], f"{source}: output")
    return resolved


def _resolve_calls(value: Any, folder: Path, source: str) -> Any:
    """A copy of the raw value in which `file.py:name` calls, at any depth, name the file by its absolute path."""
    if isinstance(value, list):
        return [_resolve_calls(item, folder, source) for item in value]
    if not isinstance(value, Mapping):
        return value
    resolved = {key: _resolve_calls(item, folder, source) for key, item in value.items()}
    call = resolved.get("call")
    if isinstance(call, str) and ".py:" in call:
        file, _, name = call.rpartition(":")
        resolved["call"] = f"{_absolute_path(file, folder, f'{source}: call')}:{name}"
    return resolved

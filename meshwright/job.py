"""`Job`: what to train, as the user's YAML file says it: model, data, loss, optimizer, length, and how to log and save.
`load_job` reads a file; a mistake in it raises an `InputError` that names the field in one line."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, model_validator
from pydantic_core import PydanticCustomError
from yaml import YAMLError

from meshwright.call import Call
from meshwright.errors import InputError, did_you_mean
from meshwright.files.remote import check_url, is_url
from meshwright.files.user_path import expand_home, user_path
from meshwright.files.yaml_file import dump, parse, parse_mapping, read_mapping, validate
from meshwright.limits import Count, CountOrZero, Parts, ProcessesOrZero, Samples, Seed, Steps, StepsOrZero, Timeout
from meshwright.plan import Numerics, Plan

MOST_PROFILED_STEPS = 1_000  # the trace of a step has a few megabytes
_DEEPEST_FIELD = 50  # names before the last dot of a field that `--set` sets, such as an argument of a nested call


class _Section(BaseModel):
    """A frozen section of a job that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_sample_weights(weights: Any) -> Any:
    """Returns the value of `data.weights`. If it has another form than the field allows, raises an error that says what
    to write."""
    if weights is None or isinstance(weights, str | Call) or (isinstance(weights, Mapping) and "call" in weights):
        return weights
    form = "{call: package.module:name, ...}"
    raise PydanticCustomError("weights", "write the path of a file, or {form}", {"form": form})


def _check_root(root: str) -> str:
    return check_url(root) if is_url(root) else root


class Data(_Section):
    """The data sets, and how ranks load them.

    `root`, `synthetic` and `damaged` are passed as keyword arguments to those data sets that accept them.
    """

    train: Call
    eval: Call | None = None
    root: Annotated[str, AfterValidator(_check_root)] | None = None  # folder or URL of the full data set
    synthetic: bool = False  # generate data in the format of the full data set instead of reading it
    # What the ranks divide: each global batch, the data set in fixed parts, or the features of each sample's input.
    partition: Literal["batch", "sample", "dimension"] = "batch"
    parts: Parts | None = None  # number of fixed parts for `partition: sample`; null: one per rank
    # One weight per training sample, from a function or from a file: samples are drawn by weight, with replacement.
    weights: Annotated[Call | str | None, BeforeValidator(_check_sample_weights)] = None
    epoch_samples: Samples | None = None  # number of samples that an epoch draws by weight; null: as many as there are
    sampler: Call | None = None  # torch's WeightedRandomSampler, in place of `weights` and `epoch_samples`
    workers: ProcessesOrZero = 0  # loader processes per rank
    pin_memory: bool | None = None  # null: only where there are GPUs
    collate: Call | None = None
    target: str | None = None  # key of the target in batches that are dicts; null: target(s) or label(s)
    drop_last: bool = False
    damaged: Literal["fatal", "skip"] = "fatal"  # what to do with a sample whose file cannot be read

    def check_sampling(self) -> None:
        """Raises a ValueError if the fields about drawing samples by weight contradict each other or other fields."""
        if self.epoch_samples is not None and self.weights is None:
            raise ValueError("data.epoch_samples is the number of samples drawn by weight, but data.weights is missing")
        if self.sampler is not None and self.weights is not None:
            raise ValueError("data.weights and data.sampler both say how samples are drawn: leave out one of them")
        if self.partition == "sample" and (self.sampler or self.weights):
            raise ValueError(
                "data.partition is sample, which visits each sample once per epoch, but data.weights or data.sampler"
                " draws samples by weight: set data.partition to batch, or leave the weights out"
            )


def _check_groups(groups: Any) -> Any:
    """Returns the value of `optimizer.groups`. If it has another form than the field allows, raises an error that says
    what to write."""
    if groups == "no_decay" or (isinstance(groups, list) and all(map(_is_group, groups))):
        return groups
    example = '[{match: "head.*", lr: 0.1}, no_decay]'
    raise PydanticCustomError("groups", "write no_decay, or a list such as {list}, or leave it out", {"list": example})


def _is_group(item: Any) -> bool:
    return item == "no_decay" or (isinstance(item, dict) and all(isinstance(key, str) for key in item))


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise PydanticCustomError("name", "write letters, digits, '_', '.' and '-' only, as folders get this name")
    return name


class Optimizer(Call):
    """The optimizer's class and options, and its parameter groups.

    `groups` is the word `no_decay` (no weight decay on norms and biases), or a list that may hold this word and groups
    such as `{match: "head.*", lr: 0.1}`. A parameter belongs to the first group whose `match` fits its name.
    """

    groups: Annotated[
        Literal["no_decay"] | list[Literal["no_decay"] | dict[str, Any]], BeforeValidator(_check_groups)
    ] = Field(default_factory=list)


class LearningRateSchedule(Call):
    """The learning-rate schedule's class and options.

    `per` says whether it is stepped after every optimizer `step` or after every `epoch`; null means `epoch` when the
    job sets `train.epochs`, and `step` otherwise. A schedule that needs a metric, as `ReduceLROnPlateau`, is stepped
    after each evaluation instead, with the value of `metric`; null means `loss`.
    """

    per: Literal["step", "epoch"] | None = None
    metric: str | None = None


class Weights(_Section):
    """A file or a Hugging Face folder of pretrained weights to start from. Parameters that match a `skip` pattern keep
    their initial values."""

    path: str
    skip: list[str] = []


_HINTS = {
    **{kind.__name__: "write {call: package.module:name, ...}" for kind in (Call, Optimizer, LearningRateSchedule)},
    Weights.__name__: "write the path of a file or a Hugging Face folder, or {path: file_or_folder, skip: [patterns]}",
}


class LossScaleSettings(_Section):
    """How the loss scale of fp16 is adapted. It begins with `start`, is doubled after `interval` steps without
    overflow, and halved at every `hysteresis`-th step with one. With `consecutive_hysteresis` only overflows without a
    finite step between them are counted together. A run whose scale would go below `lowest` ends. `fixed` is a scale
    that is not adapted."""

    start: PositiveFloat = 2.0**16
    interval: Steps = 2000
    hysteresis: Count = 1
    consecutive_hysteresis: bool = False
    lowest: PositiveFloat = 2.0**-10
    fixed: PositiveFloat | None = None


class Train(_Section):
    """Length and settings of the training. The run ends after `epochs` or `steps`, whichever comes first."""

    epochs: Count | None = None
    steps: Steps | None = None
    global_batch: Samples = 128
    clip_norm: PositiveFloat | None = None
    seed: Seed = 0
    weights: Weights | None = None
    freeze: list[str] = []
    deterministic: bool = False
    # What to do when the loss is NaN or infinite: end the run after 3 such steps in a row, leave out their updates, or
    # go back to the last checkpoint and leave out their batches. The last two look at the gradients, too.
    on_nonfinite: Literal["skip", "rewind", "stop"] = "stop"
    loss_scale: LossScaleSettings = LossScaleSettings()  # of fp16
    timeout_s: Timeout = 600  # how long a rank waits for the others
    restarts: CountOrZero = 3  # how often failed ranks are started again
    grace_s: Timeout = 30  # how long ranks may take to save after a stop signal

    @model_validator(mode="before")
    @classmethod
    def _weights_may_be_a_path(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("weights"), str):
            return {**raw, "weights": {"path": raw["weights"]}}
        return raw


class Checkpoint(_Section):
    """When to save checkpoints and which to keep.

    `best` is the name of the metric that selects the best checkpoint. `better` says whether `lower` or `higher` values
    are better; null means lower for losses, errors and perplexities, and higher otherwise. With `frozen: false`, frozen
    parameters are left out: a run that resumes gets them from `model` and `train.weights` again. `copy_to` is the URL
    of a folder to which every checkpoint is copied, such as s3://bucket/folder. With `asynchronous`, training goes on
    as soon as a checkpoint is copied to memory. On a full disk, the run ends, or the checkpoint waits for space."""

    every_steps: Steps | None = 100
    keep: Count = 3
    best: str | None = None
    better: Literal["lower", "higher"] | None = None
    frozen: bool = True
    copy_to: Annotated[str, AfterValidator(check_url)] | None = None
    asynchronous: bool = True
    on_full: Literal["stop", "wait"] = "stop"


def _check_profile_steps(steps: tuple[int, int]) -> tuple[int, int]:
    first, end = steps
    if not first < end <= first + MOST_PROFILED_STEPS:
        problem = "write the first step and the one after the last, of at most {most} steps, such as [10, 13]"
        raise PydanticCustomError("profile_steps", problem, {"most": MOST_PROFILED_STEPS})
    return steps


class Log(_Section):
    """When to log and when to evaluate. With `eval_every_steps: null` the run evaluates after every epoch and at the
    end. `profile_steps: [10, 13]` profiles steps 10, 11 and 12, counted from 0."""

    every_steps: Steps = 10
    eval_every_steps: Steps | None = None
    tensorboard: bool = True
    profile_steps: Annotated[tuple[StepsOrZero, Steps], AfterValidator(_check_profile_steps)] | None = None


class Job(_Section):
    """Everything that a job file says.

    `synthetic` maps dotted field names to the values that they take when `data.synthetic` is true, so that a job for a
    large cluster can be tried on a small machine.
    """

    name: Annotated[str, AfterValidator(_check_name)] = "job"  # runs are written to folders with this name
    model: Call
    data: Data
    loss: Call | None = None  # null: the model returns its loss
    metrics: dict[str, Call] = {}
    optimizer: Optimizer
    schedule: LearningRateSchedule | None = None
    callbacks: list[Call] = []  # objects that are called as the run goes on, see train/callbacks/callbacks.py
    train: Train = Train(epochs=1)
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    plan: Literal["auto"] | Plan = "auto"
    # What `plan: auto` may do to the numerical result: nothing but another order of sums, other last bits, or anything.
    allow: Numerics = "rounding"
    tune: bool = True  # a long run with `plan: auto` first measures which `compute` fields make its steps faster
    cluster: str = "local"
    output: str = "runs"
    synthetic: dict[str, Any] = {}

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
    raw.setdefault("name", re.sub(r"[^\w.-]", "-", file.stem))
    for setting in settings:
        _override(raw, setting)
    _apply_synthetic_sizes(raw, {setting.partition("=")[0] for setting in settings})
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

"""The sections of a job file: data, optimizer, schedule, the length of the run, checkpoints and logs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, model_validator
from pydantic_core import PydanticCustomError

from meshwright.files.remote import check_url, is_url
from meshwright.numbers.limits import (
    Count,
    CountOrZero,
    Parts,
    ProcessesOrZero,
    Samples,
    Seed,
    Steps,
    StepsOrZero,
    Timeout,
    at_least,
    at_most,
)
from meshwright.user.call import Call

MOST_PROFILED_STEPS = 1_000  # the trace of a step has a few megabytes


class Section(BaseModel):
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


class Data(Section):
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
    timeout_s: Timeout | None = None  # how long a loader process may take for a batch; null: as long as it likes
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

    def check_timeout(self) -> None:
        """Raises a ValueError if there is a limit for processes of which there are none."""
        if self.timeout_s is not None and not self.workers:
            raise ValueError(
                f"data.timeout_s is {self.timeout_s:g}, but data.workers is 0, and a rank cannot interrupt itself: set"
                " data.workers to 1 or more, or leave out data.timeout_s"
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


class Weights(Section):
    """A file or a Hugging Face folder of pretrained weights to start from. Parameters that match a `skip` pattern keep
    their initial values."""

    path: str
    skip: list[str] = []


class LossScaleSettings(Section):
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


class SpikeSettings(Section):
    """Which loss is a spike: one that is more than `deviations` standard deviations above the median of the last
    `window` losses. Both are computed so that single spikes among them do not count."""

    window: Annotated[Steps, at_least(5, "5 steps"), at_most(10_000, "10,000 steps")] = 100
    deviations: PositiveFloat = 10


class Train(Section):
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
    # What to do when the loss is far above those of the steps before: nothing, end the run, leave out the update, or go
    # back to the last checkpoint and leave out the batch.
    on_spike: Literal["ignore", "skip", "rewind", "stop"] = "ignore"
    spike: SpikeSettings = SpikeSettings()  # which loss is one
    loss_scale: LossScaleSettings = LossScaleSettings()  # of fp16
    timeout_s: Timeout = 600  # how long a rank waits for the others
    restarts: CountOrZero = 3  # how often failed ranks are started again
    grace_s: Timeout = 30  # how long ranks may take to save after a stop signal
    spare: bool = True  # whether a process that has imported all that ranks need waits to start them again

    @model_validator(mode="before")
    @classmethod
    def _weights_may_be_a_path(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("weights"), str):
            return {**raw, "weights": {"path": raw["weights"]}}
        return raw


class Checkpoint(Section):
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


class Log(Section):
    """When to log and when to evaluate. With `eval_every_steps: null` the run evaluates after every epoch and at the
    end. `profile_steps: [10, 13]` profiles steps 10, 11 and 12, counted from 0."""

    every_steps: Steps = 10
    eval_every_steps: Steps | None = None
    tensorboard: bool = True
    profile_steps: Annotated[tuple[StepsOrZero, Steps], AfterValidator(_check_profile_steps)] | None = None

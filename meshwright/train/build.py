"""Builds the parts of a run from its job: data sets, loading options, metrics and the model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.data.loading import LoadingOptions, is_stream
from meshwright.data.samples import collate_samples, dataset_size, read_first_samples, read_sample
from meshwright.errors import InputError, MeshwrightError, ModelConstructorError, did_you_mean
from meshwright.files.remote_data import local_root
from meshwright.files.weights_file import open_weights
from meshwright.job import Job
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.parallel.weights.pretrained import PretrainedTensor, load_pretrained, match_tensors
from meshwright.train.metrics import Metric
from meshwright.train.step.optimizer import matches
from meshwright.train.step.sampling import build_sampling
from meshwright.user.call import Call, bind, build
from meshwright.user.code import describe_error, user_position
from meshwright.user.job_sections import Weights


def build_data(job: Job) -> tuple[Any, Any]:
    """Returns the training set and the evaluation set. The latter is None if the job has none."""
    offered: dict[str, Any] = {
        "synthetic": job.data.synthetic,
        "damaged": job.data.damaged,
        "seed": job.train.seed,
    }
    if job.data.root is not None:  # otherwise the data set uses its default
        offered["root"] = local_root(job.data.root)
    train = _build_dataset(job.data.train, offered, "data.train")
    evaluation = _build_dataset(job.data.eval, offered, "data.eval") if job.data.eval else None
    for role, dataset in (("data.train", train), ("data.eval", evaluation)):
        if dataset is not None and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise InputError(
                f"{role} makes a {type(dataset).__name__}, which is no data set: it lacks __getitem__ and __iter__"
            )
        if dataset is not None and hasattr(dataset, "__len__"):
            dataset_size(dataset, role)  # raises an error if this is no number of samples, or 0
    return train, evaluation


def _build_dataset(call: Call, offered: dict[str, Any], role: str) -> Any:
    try:
        return build(call, offered=offered, role=role)
    except OSError as error:  # a missing folder, or a file that cannot be read
        raise InputError(f"{role}: {call.call}: {error}") from None
    except MeshwrightError:
        raise
    except Exception as error:
        raise InputError(f"{role}: {call.call} failed: {describe_error(error)}") from error


def build_loading(job: Job, device: torch.device) -> LoadingOptions:
    """Returns the job's loading options for ranks on this kind of device. Memory is pinned for CUDA devices only."""
    pin = job.data.pin_memory if job.data.pin_memory is not None else device.type == "cuda"
    collate = bind(job.data.collate, "data.collate") if job.data.collate else None
    return LoadingOptions(
        workers=job.data.workers,
        timeout_s=job.data.timeout_s,
        pin_memory=pin and device.type == "cuda",
        collate=collate,
        partition=job.data.partition,
        parts=job.data.parts,
        sampling=build_sampling(job),
    )


def build_metrics(job: Job) -> dict[str, Metric]:
    """Returns the job's metric functions by name."""
    return {name: bind(call, f"metrics.{name}") for name, call in job.metrics.items()}


def build_initialized_model(job: Job) -> nn.Module:
    """Returns the job's model as training starts with it: with weights initialized from the seed or loaded from
    `train.weights`, and with the parameters frozen that match `train.freeze`."""
    model = initialize_model(lambda: construct_model(job), job.train.seed)
    if job.train.weights:
        load_weights(model, job.train.weights)
    freeze(model, job.train.freeze)
    return model


def construct_model(job: Job) -> nn.Module:
    """Calls the job's model constructor and returns the model, without seeding, loading or freezing anything. Raises a
    `ModelConstructorError` if a constructor of a library fails. What the user's own code raises is raised as it is."""
    try:
        model = build(job.model, role="model")
    except MeshwrightError:
        raise
    except Exception as error:  # whatever a library raises about the arguments
        if user_position(error) is not None:
            raise
        raise ModelConstructorError(f"model: {job.model.call} failed: {describe_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {job.model.call} makes a {type(model).__name__}, not an nn.Module")
    return model


def freeze(model: nn.Module, patterns: list[str]) -> tuple[str, ...]:
    """Freezes the parameters that match the patterns. Returns the names of modules whose parameters are all frozen;
    empty if there are no patterns."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        names = [name for name in parameters if matches(name, pattern)]
        if not names:
            known_names = [*parameters, *(name for name, _ in model.named_modules() if name)]
            raise InputError(f"train.freeze: '{pattern}' matches no parameter{did_you_mean(pattern, known_names)}")
        for name in names:
            parameters[name].requires_grad_(False)
    return frozen_modules(model) if patterns else ()


def frozen_modules(model: nn.Module) -> tuple[str, ...]:
    """The names of modules that have at least one parameter and whose parameters are all frozen."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters())
    )


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Loads pretrained weights into the model by name. Names that match `train.weights.skip` are ignored in the files
    and keep their initial values in the model. All other names and shapes must be the same in the files and in the
    model."""
    load_pretrained(model, match_weights(model, weights))


def match_weights(model: nn.Module, weights: Weights) -> dict[str, PretrainedTensor]:
    """Returns the pretrained values of parameters and buffers by name, as `match_tensors` does. The model may be on the
    meta device."""
    files = open_weights(Path(weights.path))
    return match_tensors(model, files, lambda name: any(matches(name, pattern) for pattern in weights.skip))


def sample_batch(job: Job, dataset: Any) -> Any:
    """Returns a batch of the data set's first two samples, from which the structure of its batches can be seen."""
    collate = bind(job.data.collate, "data.collate") if job.data.collate else default_collate
    if not is_stream(dataset):
        indices = [index % dataset_size(dataset) for index in range(2)]
        samples = [read_sample(dataset, index) for index in indices]
    else:
        samples = read_first_samples(dataset, 2)
        indices = list(range(len(samples)))
    return collate_samples(collate, samples, dataset, indices)


def schedule_unit(job: Job) -> Any:
    """Returns `step` or `epoch`: the unit after which the learning-rate schedule is stepped."""
    if job.schedule and job.schedule.per:
        return job.schedule.per
    return "epoch" if job.train.epochs else "step"

"""The parts of a run made from its job: data, model, loss, metrics, optimizer and schedule."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.call import Call, bind, build, complaint
from meshwright.data.loading import Loading
from meshwright.errors import InputError, MeshwrightError, did_you_mean
from meshwright.job import Job, Weights
from meshwright.parallel.weights.initialize import initialized
from meshwright.train.metrics import Metric
from meshwright.train.step.optimizer import matches


def build_data(job: Job) -> tuple[Any, Any]:
    """The training set and, where the job has one, the evaluation set."""
    offered: dict[str, Any] = {
        "synthetic": job.data.synthetic,
        "damaged": job.data.damaged,
        "seed": job.train.seed,
    }
    if job.data.root is not None:  # otherwise a data set's own default holds
        offered["root"] = job.data.root
    train = _build_dataset(job.data.train, offered, "data.train")
    evaluation = _build_dataset(job.data.eval, offered, "data.eval") if job.data.eval else None
    for role, dataset in (("data.train", train), ("data.eval", evaluation)):
        if dataset is not None and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise InputError(f"{role} makes a {type(dataset).__name__}, which is no data set")
        if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:
            raise InputError(f"{role} is empty: there is nothing to train on or to evaluate")
    return train, evaluation


def _build_dataset(call: Call, offered: dict[str, Any], role: str) -> Any:
    try:
        return build(call, offered=offered, role=role)
    except OSError as error:  # a folder that is not there, a file that is no image
        raise InputError(f"{role}: {call.call}: {error}") from None
    except MeshwrightError:
        raise
    except Exception as error:
        raise InputError(f"{role}: {call.call} failed: {complaint(error)}") from error


def build_loading(job: Job, device: torch.device) -> Loading:
    pin = job.data.pin_memory if job.data.pin_memory is not None else device.type == "cuda"
    collate = bind(job.data.collate, "data.collate") if job.data.collate else None
    return Loading(
        workers=job.data.workers,
        pin_memory=pin and device.type == "cuda",
        collate=collate,
        partition=job.data.partition,
        parts=job.data.parts,
    )


def build_metrics(job: Job) -> dict[str, Metric]:
    return {name: bind(call, f"metrics.{name}") for name, call in job.metrics.items()}


def build_model(job: Job) -> nn.Module:
    """The model with its initial or pretrained weights, some of its parameters frozen."""
    model = initialized(lambda: make_model(job), job.train.seed)
    if job.train.weights:
        load_weights(model, job.train.weights)
    freeze(model, job.train.freeze)
    return model


def make_model(job: Job) -> nn.Module:
    model = build(job.model, role="model")
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {job.model.call} makes a {type(model).__name__}, not an nn.Module")
    return model


def freeze(model: nn.Module, patterns: list[str]) -> tuple[str, ...]:
    """Stops the training of what the patterns name; returns the modules that are frozen as a whole."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if matches(name, pattern)]
        if not matched:
            known = [*parameters, *(name for name, _ in model.named_modules() if name)]
            raise InputError(f"train.freeze: '{pattern}' matches no parameter{did_you_mean(pattern, known)}")
        for name in matched:
            parameters[name].requires_grad_(False)
    return frozen_modules(model) if patterns else ()


def frozen_modules(model: nn.Module) -> tuple[str, ...]:
    """Modules with parameters of which none is trained."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters())
    )


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Pretrained weights by name: all of the model's must be there, but for those the job skips."""
    found = {name: v for name, v in _read_weights(Path(weights.path)).items() if not _skipped(name, weights)}
    own = model.state_dict()
    wanted = [name for name in own if not _skipped(name, weights)]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InputError(
            f"train.weights: {weights.path} has no {missing[0]}{did_you_mean(missing[0], found)};"
            " name what shall keep its fresh values in train.weights.skip"
        )
    for name in wanted:
        if found[name].shape != own[name].shape:
            raise InputError(
                f"train.weights: {name} is {tuple(found[name].shape)} in {weights.path}, but"
                f" {tuple(own[name].shape)} in the model; name it in train.weights.skip to start it fresh"
            )
    unknown = [name for name in found if name not in own]
    if unknown:
        raise InputError(
            f"train.weights: {weights.path} holds {unknown[0]}, which the model has not"
            f"{did_you_mean(unknown[0], own)}; name it in train.weights.skip to leave it out"
        )
    model.load_state_dict(found, strict=False)


def sample_batch(job: Job, dataset: Any) -> Any:
    """Two samples as the model gets them, for whoever wants to know what a batch looks like."""
    samples = [dataset[index % len(dataset)] for index in range(2)] if _is_mapped(dataset) else _first_two(dataset)
    return (bind(job.data.collate, "data.collate") if job.data.collate else default_collate)(samples)


def _is_mapped(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__")


def _first_two(stream: Any) -> list[Any]:
    return list(islice(iter(stream), 2))


def schedule_unit(job: Job) -> Any:
    if job.schedule and job.schedule.per:
        return job.schedule.per
    return "epoch" if job.train.epochs else "step"


def _skipped(name: str, weights: Weights) -> bool:
    return any(matches(name, pattern) for pattern in weights.skip)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InputError(f"train.weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"train.weights: {path} cannot be read as weights: {reason}") from None
    for key in ("state_dict", "model"):  # how other trainers wrap them
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(v, torch.Tensor) for v in loaded.values()):
        raise InputError(f"train.weights: {path} holds no mapping of names to tensors")
    return loaded

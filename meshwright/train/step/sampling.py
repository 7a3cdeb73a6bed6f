"""Builds the weighted sampling of a job from `data.weights` and `data.epoch_samples`, or from `data.sampler`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import WeightedRandomSampler

from meshwright.data.loading import is_stream
from meshwright.data.samples import dataset_size, name_of
from meshwright.data.sampling import WeightedSampling
from meshwright.errors import InputError, MeshwrightError
from meshwright.job import Job
from meshwright.user.call import build
from meshwright.user.code import first_line, raise_user_code_error
from meshwright.user.job_sections import Data


def build_sampling(job: Job) -> WeightedSampling | None:
    """Returns how the job draws its training samples by weights. None if it has no weights: then an epoch has each
    sample once."""
    data = job.data
    if data.sampler is not None:
        sampler = _build(data.sampler, job, "data.sampler")
        if type(sampler) is not WeightedRandomSampler:
            raise InputError(
                f"data.sampler: {data.sampler.call} makes a {type(sampler).__name__}, but only the order of torch's"
                " WeightedRandomSampler can be the same on any number of ranks: give one weight per sample in"
                " data.weights, or leave data.sampler out for a random order"
            )
        return WeightedSampling(_as_array(sampler.weights, "data.sampler"), sampler.num_samples, sampler.replacement)
    if data.weights is None:
        return None
    weights = _read_weights(data, job)
    return WeightedSampling(weights, data.epoch_samples or len(np.atleast_1d(weights)))


def check_sampling(train_set: Any, sampling: WeightedSampling | None) -> None:
    """Raises an `InputError` if the samples of this data set cannot be drawn by these weights."""
    if sampling is None:
        return
    if is_stream(train_set):
        raise InputError(
            f"data.weights and data.sampler choose samples by their index, but data.train makes {name_of(train_set)},"
            " which is a stream: give it __getitem__ and __len__, or let the stream itself choose its samples"
        )
    sampling.check_size(dataset_size(train_set, "data.train"))


def _read_weights(data: Data, job: Job) -> np.ndarray:
    if not isinstance(data.weights, str):
        assert data.weights is not None
        return _as_array(_build(data.weights, job, "data.weights"), "data.weights")
    file = Path(data.weights)
    try:
        if file.suffix == ".npy":
            return _as_array(np.load(file, allow_pickle=False), "data.weights")
        return np.array([float(line) for line in file.read_text().split()], np.float64)
    except (OSError, ValueError) as error:
        raise InputError(
            f"data.weights: {file} cannot be read as numbers, one for each sample, in a text or .npy file:"
            f" {first_line(error)}"
        ) from None


def _build(call: Any, job: Job, role: str) -> Any:
    offered: dict[str, Any] = {"synthetic": job.data.synthetic, "seed": job.train.seed}
    if job.data.root is not None:
        offered["root"] = job.data.root
    try:
        return build(call, offered=offered, role=role)
    except MeshwrightError:
        raise
    except Exception as error:
        raise_user_code_error(error, f"{role}: {call.call} failed")


def _as_array(weights: Any, role: str) -> np.ndarray:
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().cpu()
    try:
        return np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{role}: a {type(weights).__name__} is no list of weights: give one number for each sample"
        ) from None

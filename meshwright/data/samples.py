"""Reads the length and the samples of a data set, and collates samples. All of this is the user's code: whatever it
raises becomes a `UserCodeError` that names the sample, the file and the line. Otherwise a loader would take a
`StopIteration` for the end of the data, for example."""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from meshwright.errors import InputError, UserCodeError
from meshwright.user.code import line_of_function, raise_user_code_error, user_position

MOST_SAMPLES = 10**12  # the order of an epoch takes 8 bytes per sample
_MOST_NAMED = 4  # an error names at most so many samples


def dataset_size(dataset: Any, name: str | None = None) -> int:
    """Returns the number of samples, which is at least 1. `name` is what error messages call the data set; None for its
    class name."""
    name = name or f"the data set {name_of(dataset)}"
    if isinstance(dataset, Mapping) and all(isinstance(key, str) for key in dataset):
        keys = ", ".join(map(repr, dataset))
        raise InputError(
            f"{name} is a {type(dataset).__name__} with the keys {keys or 'of no split'}, not a data set: choose one of"
            " its data sets by its key"
        )
    length = getattr(type(dataset), "__len__", None)
    no_length = f"{name} has no length: give it __len__, or make it an IterableDataset to stream it"
    if length is None:
        raise InputError(no_length)
    try:
        returned = length(dataset)
    except NotImplementedError:
        raise InputError(no_length) from None
    except BaseException as error:
        raise_user_code_error(error, f"the length of {name}")
    try:
        size = operator.index(returned)
    except TypeError:
        size = -1
    if not 0 <= size <= min(MOST_SAMPLES, sys.maxsize):
        raise UserCodeError(
            f"the length of {name} is {returned!r}, but it must be a whole number from 1 to {MOST_SAMPLES:.0e}"
            f"{_defined_at(length)}"
        )
    if size == 0:
        raise InputError(f"{name} is empty: there is nothing to load")
    return size


def read_sample(dataset: Any, index: int) -> Any:
    """Returns one sample."""
    try:
        return dataset[index]
    except BaseException as error:
        raise_user_code_error(error, f"sample {index} of {name_of(dataset)}")


def read_samples(read: Callable[[Any], Any], dataset: Any, indices: Sequence[int] | np.ndarray) -> Any:
    """Returns what `read`, a method of the data set for several samples, returns for these samples."""
    try:
        return read(indices)
    except BaseException as error:
        raise_user_code_error(error, describe_samples(dataset, indices))


def read_first_samples(stream: Any, count: int) -> list[Any]:
    """Returns the first samples of a stream, at most `count` of them."""
    try:
        return list(islice(iter(stream), count))
    except BaseException as error:
        raise_user_code_error(error, f"the first samples of the stream {name_of(stream)}")


def collate_samples(
    collate: Callable[[list[Any]], Any], samples: list[Any], dataset: Any, indices: Sequence[int]
) -> Any:
    """Returns the batch that `collate` makes of these samples, which have these indices in the data set."""
    try:
        batch = collate(samples)
    except BaseException as error:
        what_failed = f"making a batch of {describe_samples(dataset, indices)}"
        if user_position(error) is not None:
            raise_user_code_error(error, what_failed)
        # torch's collate function cannot make a batch of such samples: the data set's code is to blame.
        where = _defined_at(getattr(type(dataset), "__getitem__", None))
        for index, sample in zip(indices, samples, strict=False):
            if sample is None:
                raise UserCodeError(f"sample {index} of {name_of(dataset)} is None: return a sample{where}") from error
        unequal = _unequal_key(samples)
        if unequal is not None:
            raise UserCodeError(f"{what_failed}: {unequal}") from error
        advice = " (samples of different sizes need data.collate, the collate_fn of a DataLoader)"
        raise_user_code_error(error, f"{what_failed}{where}{advice if 'equal size' in str(error) else ''}")
    if collate is default_collate and is_hugging_face(dataset) and isinstance(samples[0], dict):
        _check_no_lists(samples[0])
    return batch


def _check_no_lists(row: dict[str, Any]) -> None:
    """Raises an `InputError` if a row of Hugging Face's `datasets` has a list of numbers. torch's collate function
    makes one tensor for each position of the list, which no model expects."""
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], int | float | list):
            raise InputError(
                f"'{key}' is a list in the rows of the data set, and lists do not become tensors: call"
                ' with_format("torch") of the data set, or give a collate function'
            )


def _unequal_key(samples: list[Any]) -> str | None:
    """Returns which key of dict samples, or which position of tuples, has values that cannot become one tensor, and
    what to do. None if the samples are something else, or if no such value is found."""
    if all(isinstance(sample, Mapping) for sample in samples):
        keys: list[Any] = [key for key in samples[0] if all(key in sample for sample in samples)]
    elif all(isinstance(sample, tuple) and len(sample) == len(samples[0]) for sample in samples):
        keys = list(range(len(samples[0])))
    else:
        return None
    for key in keys:
        values = [sample[key] for sample in samples]
        where = f"'{key}'" if isinstance(key, str) else f"part {key} of a sample"
        if any(value is None for value in values):
            return f"{where} is None in some samples: fill it in or leave it out, or give a collate function"
        shapes = list(dict.fromkeys(map(_shape, values)))
        if len(shapes) > 1 and None not in shapes:
            return (
                f"{where} has the shapes {shapes[0]} and {shapes[1]}: pad the samples to one length, or give a collate"
                " function that does"
            )
    return None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a tensor, an array or a list of numbers; None for other values."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    return (len(value),) if isinstance(value, list) else None


def describe_samples(dataset: Any, indices: Sequence[int] | np.ndarray) -> str:
    """Returns words such as `samples 3, 17, 4 of Pictures`, which name the first few of the samples."""
    named = ", ".join(str(index) for index in indices[:_MOST_NAMED])
    more = f" and {len(indices) - _MOST_NAMED} more" if len(indices) > _MOST_NAMED else ""
    return f"sample{'s' if len(indices) > 1 else ''} {named}{more} of {name_of(dataset)}"


def is_hugging_face(dataset: Any) -> bool:
    """Whether a data set is one of Hugging Face's `datasets`, with random access or streamed."""
    return type(dataset).__module__.partition(".")[0] == "datasets"


def check_undivided(dataset: Any) -> None:
    """Raises an `InputError` if a stream of Hugging Face's `datasets` gives each rank its own samples already."""
    if is_hugging_face(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise InputError(
            "the stream was divided with split_dataset_by_node, but Meshwright divides its samples among ranks: leave"
            " split_dataset_by_node out"
        )


def name_of(dataset: Any) -> str:
    """Returns the class name of the user's data set, also if a rank reads only some of its columns."""
    return type(getattr(dataset, "whole_rows", dataset)).__name__


def _defined_at(function: Any) -> str:
    """Returns the end of a message that says where a function is defined, such as ` (my_data.py, line 12)`. Empty for
    functions that are not written in Python."""
    line = line_of_function(function)
    return f" ({line})" if line else ""

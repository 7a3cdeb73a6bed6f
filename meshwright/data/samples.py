"""Reads the length and the samples of a data set, and collates samples. All of this is the user's code: whatever it
raises becomes a `UserCodeError` that names the sample, the file and the line. Otherwise a loader would take a
`StopIteration` for the end of the data, for example."""

import operator
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from meshwright.errors import InputError, UserCodeError
from meshwright.user_code import raise_user_code_error, user_position

MOST_SAMPLES = 10**12  # the order of an epoch takes 8 bytes per sample
_MOST_NAMED = 4  # an error names at most so many samples


def dataset_size(dataset: Any, name: str | None = None) -> int:
    """Returns the number of samples, which is at least 1. `name` is what error messages call the data set; None for its
    class name."""
    name = name or f"the data set {name_of(dataset)}"
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
        return collate(samples)
    except BaseException as error:
        what_failed = f"making a batch of {describe_samples(dataset, indices)}"
        if user_position(error) is not None:
            raise_user_code_error(error, what_failed)
        # torch's collate function cannot make a batch of such samples: the data set's code is to blame.
        where = _defined_at(getattr(type(dataset), "__getitem__", None))
        for index, sample in zip(indices, samples, strict=False):
            if sample is None:
                raise UserCodeError(f"sample {index} of {name_of(dataset)} is None: return a sample{where}") from error
        raise_user_code_error(error, f"{what_failed}{where}")


def describe_samples(dataset: Any, indices: Sequence[int] | np.ndarray) -> str:
    """Returns words such as `samples 3, 17, 4 of Pictures`, which name the first few of the samples."""
    named = ", ".join(str(index) for index in indices[:_MOST_NAMED])
    more = f" and {len(indices) - _MOST_NAMED} more" if len(indices) > _MOST_NAMED else ""
    return f"sample{'s' if len(indices) > 1 else ''} {named}{more} of {name_of(dataset)}"


def name_of(dataset: Any) -> str:
    """Returns the class name of the user's data set, also if a rank reads only some of its columns."""
    return type(getattr(dataset, "whole_rows", dataset)).__name__


def _defined_at(function: Any) -> str:
    """Returns the end of a message that says where a function is defined, such as ` (my_data.py, line 12)`. Empty for
    functions that are not written in Python."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""

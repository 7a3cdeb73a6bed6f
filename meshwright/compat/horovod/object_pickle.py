"""The pickles of `broadcast_object` and `allgather_object`: objects of the script, which may be of any class.

Reading a pickle executes code. Here that is intended: they are the user's own objects, from ranks that the user has
started, over connections between these ranks alone.
"""

import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor


def to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

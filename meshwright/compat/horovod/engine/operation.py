"""`Operation`: one call of an operation on this rank, from the call until its result is there."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compat.horovod.engine.requests import Request


@dataclass(eq=False)
class Operation:
    """A request with its tensors. `inputs` are contiguous and without autograd. `outputs` has a tensor to write to for
    each input, or is filled by the operation where the shapes of results depend on other ranks. `value` is the result
    of operations without tensors. `ready` and `finished` order the work of the GPU."""

    request: Request
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    value: int | list[int] | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        if self.request.device == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.inputs[0].device))

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        self.done.set()

    @property
    def is_done(self) -> bool:
        return self.done.is_set() and (self.error is not None or self.finished is None or self.finished.query())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype

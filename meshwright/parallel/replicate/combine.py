"""Averages gradients over the replicate axis where DDP does not fit: beside a tensor or a pipeline axis.

Gradients lie in buckets that are laid out before the first step, in reverse order of the parameters, which is about
the order in which backward makes them. A bucket travels as soon as all its gradients of a step's last microbatch are
there. Behind the gradients it carries one number per parameter: whether this rank used it. A parameter that a rank did
not use counts as zeros; one that no rank used has no gradient.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.collectives.native import Native
from meshwright.collectives.reducer import Reducer


class Combiner:
    """Holds the buckets of a run. `combining` goes around each microbatch, or `finish` behind the last one."""

    def __init__(self, buckets: "list[_Bucket]", reducer: Reducer, *, overlap: bool) -> None:
        self._buckets = buckets
        self._reducer = reducer
        weakref.finalize(self, reducer.close)
        self._next = 0  # ranks send buckets in one order, whichever is ready first
        self._last = False
        if overlap:
            for bucket in buckets:
                for place, parameter in enumerate(bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, place))

    @contextmanager
    def combining(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one microbatch: gradients travel in the last one."""
        self._last = last
        yield
        self._last = False
        if last:
            self.finish()

    def finish(self) -> None:
        """Leaves the mean gradients in the parameters; every rank of the axis calls it behind its last backward."""
        for bucket in self._buckets[self._next :]:
            bucket.collect()
            self._send(bucket)
        self._reducer.finish()
        for bucket in self._buckets:
            bucket.finish()
        self._next = 0

    def _send(self, bucket: "_Bucket") -> None:
        bucket.pack()
        self._reducer.start(bucket.sent, self._next)
        self._next += 1

    def _arrived(self, bucket: "_Bucket", place: int, parameter: Tensor) -> None:
        bucket.take(place)
        if not self._last:
            return
        assert not bucket.packed, "a gradient was added to after its bucket had been sent"
        bucket.missing.discard(place)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])


class _Bucket:
    """Parameters of one dtype and device, and the memory their gradients lie in."""

    def __init__(self, parameters: Sequence[nn.Parameter], travelling: torch.dtype | None) -> None:
        self.parameters = parameters
        self.packed = False
        self.missing = set(range(len(parameters)))
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self._gradients, begin = [], 0
        for parameter, size in zip(parameters, sizes, strict=True):
            self._gradients.append(_like(self._flat[begin : begin + size], parameter))
            begin += size
        self._used = self._flat[begin:]
        # What is sent: the bucket itself, or its numbers rounded.
        self.sent = self._flat if travelling is None else torch.empty_like(self._flat, dtype=travelling)

    def take(self, place: int) -> None:
        """Moves a gradient into the bucket, where later microbatches add to it."""
        parameter, room = self.parameters[place], self._gradients[place]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.data_ptr() != room.data_ptr() or gradient.is_sparse:
            room.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = room

    def collect(self) -> None:
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take(place)

    def pack(self) -> None:
        """Makes what is sent ready."""
        unused = [place for place, parameter in enumerate(self.parameters) if parameter.grad is None]
        self.missing = set(unused)
        self.packed = True
        self._used.fill_(1)
        for place in unused:
            self._gradients[place].zero_()
            self._used[place] = 0
        if self.sent is not self._flat:
            self.sent.copy_(self._flat)

    def finish(self) -> None:
        assert self.packed
        self.packed = False
        # A rank that used them all knows that each is used, and need not wait for the device to be told.
        if self.sent is not self._flat:
            self._flat.copy_(self.sent)
        users = self._used.tolist() if self.missing else None
        for place, parameter in enumerate(self.parameters):
            parameter.grad = self._gradients[place] if users is None or users[place] else None
        self.missing = set(range(len(self.parameters)))


def combine(
    module: nn.Module,
    reducer: Reducer,
    bucket_bytes: int,
    skip: Collection[str] = (),
    *,
    overlap: bool = True,
    travelling: torch.dtype | None = None,
) -> Combiner:
    """Averages the gradients of `module` over the reducer's ranks, all but those of the parameters called `skip`.
    Without `overlap` only `finish` sends. `travelling`: in which type, where it is not their own."""
    found = [p for name, p in module.named_parameters() if p.requires_grad and name not in skip]
    buckets = [_Bucket(parameters, travelling) for parameters in lay_buckets(found, bucket_bytes)]
    return Combiner(buckets, reducer, overlap=overlap)


def average(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Once: the mean gradients of a few parameters over the ranks of all groups."""
    for group in groups:
        buckets = [_Bucket(found, None) for found in lay_buckets(parameters, 2**25)]
        Combiner(buckets, Native(group), overlap=False).finish()


def lay_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """In reverse order, closed once `bucket_bytes` are full; each of one dtype and device."""
    buckets: list[list[nn.Parameter]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(list(parameters)):
        key = (parameter.dtype, parameter.device)
        if key not in open_:
            open_[key] = ([], 0)
            buckets.append(open_[key][0])
        bucket, filled = open_[key]
        bucket.append(parameter)
        filled += parameter.numel() * parameter.element_size()
        open_[key] = (bucket, filled)
        if filled >= bucket_bytes:
            del open_[key]
    return buckets


def _like(memory: Tensor, parameter: Tensor) -> Tensor:
    """A view of the memory with the parameter's strides, where they fill it: optimizers are faster on equal ones."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return memory.as_strided(parameter.shape, parameter.stride())
    return memory.view(parameter.shape)

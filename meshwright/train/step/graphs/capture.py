"""`capture`: captures a CUDA graph, or leaves the process as if it had not been tried.

What a failed `torch.cuda.graph` leaves behind, and what is done about it (torch 2.11 to 2.13):

    the capture's stream stays the current one          the stream is entered here, not by `torch.cuda.graph`
    the allocator still expects the capture to go on    its pool is ended and released               _end_failed()
    random generators stay in capture mode, so that     a capture that succeeds ends it              _reset_generators()
    every later random number raises an error
    tensors of the pool live in the error's frames      the frames are cleared                       _forget_frames()
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from meshwright.errors import chain_of
from meshwright.train.torch_private import end_allocating_to_pool, release_pool

T = TypeVar("T")
# Other threads, such as one that pins memory for a data loader, may use CUDA during the capture.
_ERROR_MODE = "thread_local"


class CaptureError(Exception):
    """A step could not be captured, because of the error `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def capture(
    run: Callable[[], T], stream: torch.cuda.Stream, generators: Sequence[torch.Generator]
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Returns a graph of what `run` does on the stream, and the result of `run`. `generators` are those that it draws
    from besides the default one. Raises an error of `run` or of the capture, after everything of it is undone."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    gc.collect()  # a tensor that is freed during a capture may end it
    torch.cuda.empty_cache()  # the graph cannot use cached blocks of the steps before
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
            result = run()
            graph.capture_end()
        except Exception as error:
            _forget_frames(error)
            has_ended = _end_failed(graph, pool, stream.device)
            del graph
            if not has_ended:
                _reset_generators(generators, stream.device)
            raise
    return graph, result


def _end_failed(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> bool:
    """Ends a capture that has failed, and frees its memory. Returns whether torch has ended it completely. It has not
    where CUDA has found an operation that cannot be captured."""
    has_ended = False
    with suppress(Exception):
        graph.capture_end()
        has_ended = True
    graph.reset()
    if not has_ended:
        end_allocating_to_pool(device, pool)
        release_pool(device, pool)
    return has_ended


def _reset_generators(generators: Sequence[torch.Generator], device: torch.device) -> None:
    """Ends the capture mode of the default generator and of others by a capture that succeeds. Their seeds and offsets
    stay as they are."""
    torch.cuda.synchronize()
    number, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode=_ERROR_MODE)
        number.zero_()  # torch warns about empty graphs
        graph.capture_end()
    graph.reset()


def _forget_frames(error: BaseException) -> None:
    """Frees the local variables of the functions in which an error was raised. Its traceback keeps their names."""
    for raised in chain_of(error):
        traceback.clear_frames(raised.__traceback__)

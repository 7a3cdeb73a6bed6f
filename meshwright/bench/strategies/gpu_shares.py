"""What a GPU does in its steps, from a profile of its kernels by torch.profiler."""

from collections.abc import Callable
from typing import Any

import torch

from meshwright.bench.intervals import Interval, length, union


def gpu_time_shares(step: Callable[[], Any], steps: int, *, is_pipeline: bool) -> dict[str, float] | None:
    """Runs this many steps, and returns the shares of their time: a kernel computes; or only a kernel of NCCL runs; or
    none runs, because the host or another rank is late (in a pipeline, the bubble). None without a profile."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        return None
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    computing = union(span for span, event in zip(spans, kernels, strict=True) if "nccl" not in event.name.lower())
    busy = union(spans)
    return shares_of_spans(computing, busy, is_pipeline)


def shares_of_spans(computing: list[Interval], busy: list[Interval], is_pipeline: bool) -> dict[str, float]:
    """Returns the shares of the time from the first to the last moment of `busy`, the spans in which any kernel
    runs."""
    total = busy[-1][1] - busy[0][0]
    computes, works = length(computing) / total, length(busy) / total
    idle = {"waiting": 0.0, "bubble": 0.0}
    idle["bubble" if is_pipeline else "waiting"] = 1 - works
    return {"computing": computes, "communicating": works - computes, **idle}

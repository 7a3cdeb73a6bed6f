"""Where the time of a step goes on one GPU: `python -m validation.speed.operators MODEL [FORM]` runs a model of
validation/speed/sweep in one of its forms, by default `ours`, and lists its kernels by kind."""

import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from validation.speed.sweep.forms import BY_HAND, OURS, build_by_hand, build_ours
from validation.speed.sweep.models.all_models import MODELS

_STEPS = 5
# The first line whose words are in a kernel's name is its kind; names of generated kernels list their operators.
_KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "sm90"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy"),
    "normalization": ("layer_norm", "native_batch_norm", "rsqrt"),
    "optimizer": ("adam", "sgd", "multi_tensor"),
    "embedding": ("embedding", "index_put", "indexing_backward"),
    "copies": ("memcpy", "memset", "copy"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "element-wise")


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def main(name: str, form: str = OURS) -> None:
    case, device = MODELS[name], torch.device("cuda", 0)
    is_ours = form == OURS
    build = build_ours(case, False, device, None) if is_ours else build_by_hand(case, False, device, BY_HAND[form])
    step = build().step
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, float] = defaultdict(float)
    begin, end = float("inf"), 0.0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name] += event.time_range.elapsed_us()
            begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
    kinds: dict[str, float] = defaultdict(float)
    for name, time_us in kernels.items():
        kinds[kind_of(name)] += time_us
    total = end - begin
    print(f"{name} {form}: {total / _STEPS / 1e3:.2f} ms a step")
    for kind, time_us in [*_largest(kinds), ("no kernel runs", total - sum(kinds.values()))]:
        print(f"  {kind:16} {time_us / _STEPS / 1e3:8.2f} ms {time_us / total:6.1%}")
    for name, time_us in _largest(kernels)[:25]:
        print(f"    {time_us / _STEPS / 1e3:8.2f} ms {time_us / total:6.1%}  {kind_of(name):16} {name[:110]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

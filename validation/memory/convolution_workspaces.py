"""Workspace memory of convolutions: the rule of profile/operator_costs.py compared with measurements on a GPU.

`python -m validation.memory.convolution_workspaces` compares the rule with the rows that convolution_workspaces.json
carries. On a GPU it measures those convolutions anew and prints one JSON object; `--carried` compares there, too.

    taken = peak allocated in the call - allocated before it - its results                                      _taken
    rule  = image + filters + output where images lie channels first; nothing where they lie channels last, and for
            filters of one pixel on rows of whole 16 bytes                                   operators.py: workspace_of
    kept  = the rule and what was taken differ by under a fifth of the image and the output                     agrees
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.profile.operator_costs import operator_workspace_bytes

MEASURED = Path(__file__).with_name("convolution_workspaces.json")
KIB = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEAR = 0.2


@dataclass(frozen=True)
class WorkspaceComparison:
    """KiB that one call takes beside its `tensors`, image and output; of a backward call, the larger gradient's."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    rule: float
    taken: float
    tensors: float

    @property
    def agrees(self) -> bool:
        return abs(self.rule - self.taken) <= NEAR * self.tensors


def rows() -> list[dict[str, Any]]:
    return list(json.loads(MEASURED.read_text())["rows"])


def compare(row: dict[str, Any]) -> tuple[WorkspaceComparison, WorkspaceComparison]:
    """The forward and the backward call of a carried row."""
    image, weight, output, stride = _tensors(row, "meta")
    convolution = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    beside = ([_padding(row)] * 2, [1, 1], False, [0, 0], 1)
    forward = operator_workspace_bytes("convolution", convolution, (image, weight, None, [stride] * 2, *beside), output)
    back = operator_workspace_bytes("convolution", backward, (output, image, weight, None, [stride] * 2, *beside), None)
    taken = (row["forward"], max(row["input_gradient"], row["weight_gradient"]))
    what = (tuple(row["shape"]), row["dtype"], row["channels_last"])
    first, second = (
        WorkspaceComparison(*what, rule / KIB, seen, row["input"] + row["output"])
        for rule, seen in zip((forward, back), taken, strict=True)
    )
    return first, second


def _padding(row: dict[str, Any]) -> int:
    return int(row["shape"][4]) // 2


def _tensors(row: dict[str, Any], device: str) -> tuple[Tensor, Tensor, Tensor, int]:
    batch, channels, features, size, kernel, stride = row["shape"]
    dtype = DTYPES[row["dtype"]]
    arranged = torch.channels_last if row["channels_last"] else torch.contiguous_format
    image = torch.zeros(batch, channels, size, size, dtype=dtype, device=device).to(memory_format=arranged)
    weight = torch.zeros(features, channels, kernel, kernel, dtype=dtype, device=device).to(memory_format=arranged)
    out = (size + 2 * _padding(row) - kernel) // stride + 1
    output = torch.zeros(batch, features, out, out, dtype=dtype, device=device).to(memory_format=arranged)
    return image, weight, output, stride


def measure(row: dict[str, Any]) -> dict[str, Any]:
    image, weight, output, stride = _tensors(row, "cuda")
    padding = _padding(row)

    def gradient(mask: list[bool]) -> Callable[[], Any]:
        sides = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)
        return lambda: torch.ops.aten.convolution_backward(output, image, weight, None, *sides)

    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: torch.nn.functional.conv2d(image, weight, stride=stride, padding=padding),
        "input_gradient": gradient([True, False, False]),
        "weight_gradient": gradient([False, True, False]),
    }
    sizes = {"input": image, "output": output, "weight": weight}
    told = {name: tensor.numel() * tensor.element_size() // KIB for name, tensor in sizes.items()}
    same = {name: row[name] for name in ("shape", "dtype", "channels_last")}
    return {**same, **told, **{name: _taken(call) for name, call in calls.items()}}


def _taken(call: Callable[[], Any]) -> int:
    """In KiB, of the second call: the first one may try out several ways."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del result
    return (torch.cuda.max_memory_allocated() - before - kept) // KIB


def measure_all() -> None:
    about = f"measured: one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    told = "what a convolution's call raises the allocated peak by, beside its result; KiB. `shape` is batch, input"
    source = f"{about}: {told} and output channels, rows, kernel, stride."
    print(json.dumps({"source": source, "rows": [measure(row) for row in rows()]}))


def compare_all() -> None:
    """Channels first, where the rule says something, and channels last, where it says nothing."""
    print(f"{'batch, channels, features, size, kernel, stride':48}{'dtype':10}{'rule':>12}{'taken':>12}")
    found = [one for row in rows() for one in compare(row)]
    for one in found:
        told = "" if one.agrees else "  differs"
        layout = "last" if one.channels_last else "first"
        shape = f"{', '.join(map(str, one.shape))} {layout}"
        print(f"{shape:48}{one.dtype:10}{one.rule:8,.0f} KiB{one.taken:8,.0f} KiB{told}")
    for last in (False, True):
        part = [one for one in found if one.channels_last == last]
        share = [abs(one.rule - one.taken) / one.tensors for one in part]
        layout = "last" if last else "first"
        near = f"{sum(one.agrees for one in part)} of {len(part)} within {NEAR:.0%}"
        print(f"channels {layout}: {near} of image and output, median {median(share):.1%}")


if __name__ == "__main__":
    if torch.cuda.is_available() and "--carried" not in sys.argv:
        measure_all()
    else:
        compare_all()

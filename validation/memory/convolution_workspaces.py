"""Workspace memory of convolutions: the rule of profile/operator_costs.py compared with measurements on a GPU.

`python -m validation.memory.convolution_workspaces` compares the rule with the rows that are recorded in
convolution_workspaces.json. On a machine with a GPU it measures those convolutions instead and prints one JSON object;
with `--carried` it compares with the recorded rows there, too.

    measured = peak allocated during the call - allocated before it - its results          `_measure_workspace`
    rule     = image + filters + output for contiguous (channels-first) images; nothing for channels-last images, and
               for 1×1 filters on rows of a multiple of 16 bytes                           `operator_workspace_bytes`
    agrees   = the rule and the measurement differ by at most a fifth of image + output    `WorkspaceComparison.agrees`
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
TOLERANCE = 0.2  # as a share of image and output


@dataclass(frozen=True)
class WorkspaceComparison:
    """The workspace of one call in KiB, by the rule and as measured; `tensors` is the size of image and output. A
    backward call is represented by the gradient that needs the larger workspace."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    rule: float
    measured: float
    tensors: float

    @property
    def agrees(self) -> bool:
        return abs(self.rule - self.measured) <= TOLERANCE * self.tensors


def rows() -> list[dict[str, Any]]:
    return list(json.loads(MEASURED.read_text())["rows"])


def compare(row: dict[str, Any]) -> tuple[WorkspaceComparison, WorkspaceComparison]:
    """The comparisons of the forward and of the backward call of a recorded row."""
    image, weight, output, stride = _tensors(row, "meta")
    convolution = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    settings = ([_padding(row)] * 2, [1, 1], False, [0, 0], 1)
    forward = operator_workspace_bytes(
        "convolution", convolution, (image, weight, None, [stride] * 2, *settings), output
    )
    back = operator_workspace_bytes(
        "convolution", backward, (output, image, weight, None, [stride] * 2, *settings), None
    )
    measured = (row["forward"], max(row["input_gradient"], row["weight_gradient"]))
    convolution_of_row = (tuple(row["shape"]), row["dtype"], row["channels_last"])
    first, second = (
        WorkspaceComparison(*convolution_of_row, rule / KIB, workspace, row["input"] + row["output"])
        for rule, workspace in zip((forward, back), measured, strict=True)
    )
    return first, second


def _padding(row: dict[str, Any]) -> int:
    return int(row["shape"][4]) // 2


def _tensors(row: dict[str, Any], device: str) -> tuple[Tensor, Tensor, Tensor, int]:
    batch, channels, features, size, kernel, stride = row["shape"]
    dtype = DTYPES[row["dtype"]]
    layout = torch.channels_last if row["channels_last"] else torch.contiguous_format
    image = torch.zeros(batch, channels, size, size, dtype=dtype, device=device).to(memory_format=layout)
    weight = torch.zeros(features, channels, kernel, kernel, dtype=dtype, device=device).to(memory_format=layout)
    out = (size + 2 * _padding(row) - kernel) // stride + 1
    output = torch.zeros(batch, features, out, out, dtype=dtype, device=device).to(memory_format=layout)
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
    tensors = {"input": image, "output": output, "weight": weight}
    sizes_kib = {name: tensor.numel() * tensor.element_size() // KIB for name, tensor in tensors.items()}
    convolution = {name: row[name] for name in ("shape", "dtype", "channels_last")}
    return {**convolution, **sizes_kib, **{name: _measure_workspace(call) for name, call in calls.items()}}


def _measure_workspace(call: Callable[[], Any]) -> int:
    """The workspace of the second call in KiB. The first call may try several algorithms."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    result_bytes = torch.cuda.memory_allocated() - before
    del result
    return (torch.cuda.max_memory_allocated() - before - result_bytes) // KIB


def measure_all() -> None:
    machine = f"measured: one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    fields = "KiB by which a call raises the peak of allocated memory, without its result. `shape` is batch, input and"
    source = f"{machine}: {fields} output channels, rows, kernel, stride."
    print(json.dumps({"source": source, "rows": [measure(row) for row in rows()]}))


def compare_all() -> None:
    """Prints every comparison, and a summary for channels-first and for channels-last images."""
    print(f"{'batch, channels, features, size, kernel, stride':48}{'dtype':10}{'rule':>12}{'measured':>12}")
    comparisons = [comparison for row in rows() for comparison in compare(row)]
    for comparison in comparisons:
        verdict = "" if comparison.agrees else "  differs"
        layout = "last" if comparison.channels_last else "first"
        shape = f"{', '.join(map(str, comparison.shape))} {layout}"
        sizes = f"{comparison.rule:8,.0f} KiB{comparison.measured:8,.0f} KiB"
        print(f"{shape:48}{comparison.dtype:10}{sizes}{verdict}")
    for last in (False, True):
        part = [comparison for comparison in comparisons if comparison.channels_last == last]
        share = [abs(comparison.rule - comparison.measured) / comparison.tensors for comparison in part]
        layout = "last" if last else "first"
        near = f"{sum(comparison.agrees for comparison in part)} of {len(part)} within {TOLERANCE:.0%}"
        print(f"channels {layout}: {near} of image and output, median {median(share):.1%}")


if __name__ == "__main__":
    if torch.cuda.is_available() and "--carried" not in sys.argv:
        measure_all()
    else:
        compare_all()

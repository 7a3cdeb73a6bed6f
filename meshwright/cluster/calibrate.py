"""How long each class of operators takes on a device, over shapes and dtypes: what `doctor --calibrate` writes down.

The shapes are a grid of their own, not those of any model: small to large, square and thin, so that what lies between
can be interpolated. Shapes that would take this device too long, or more memory than it has, are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.cluster.cluster import Dtype, Layout, Operator
from meshwright.cluster.reach import TORCH_DTYPES, float32_products
from meshwright.cluster.timing import device_seconds

LONGEST_S = {"cpu": 0.08, "cuda": 0.05}  # of one run, as its rate foretells
BUDGET_S = {"cpu": 0.04, "cuda": 0.02}
DTYPES: dict[str, tuple[Dtype, ...]] = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}


@dataclass(frozen=True)
class Case:
    """`build` makes the inputs and returns the forward pass, from which a backward pass is taken where there is one."""

    operator: Operator
    shape: tuple[int, ...]
    flops: float
    elements: float  # read and written
    build: Callable[[torch.dtype, torch.device], Callable[[], Tensor]]
    backward: bool = True
    layout: Layout = "contiguous"


def measure_operators(device: torch.device, rates: dict[Dtype, float]) -> list[dict[str, Any]]:
    """Rows of `OperatorTime`."""
    rows: list[dict[str, Any]] = []
    for case in cases(device.type):
        for dtype in DTYPES[device.type]:
            if dtype in rates and not _too_much(case, rates[dtype], device):
                with float32_products(dtype):
                    rows += _measure(case, dtype, device)
    return rows


def _too_much(case: Case, rate: float, device: torch.device) -> bool:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**30
    return case.flops / rate > LONGEST_S[device.type] or 16 * case.elements > free / 2


def _measure(case: Case, dtype: Dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    kind, budget_s = TORCH_DTYPES[dtype], BUDGET_S[device.type]
    try:
        run = case.build(kind, device)
        yield _row(case, dtype, "forward", 1, device_seconds(run, device, budget_s))
        if case.backward:
            # Starting autograd costs more than a small operator: several are taken back at once, as in a model.
            copies = 16 if case.elements < 2**20 else 1
            results = [run(), *(case.build(kind, device)() for _ in range(copies - 1))]
            inputs = [tensor for result in results for tensor in _leaves(result)]
            ones = [torch.ones_like(result) for result in results]
            taken = device_seconds(
                lambda: torch.autograd.grad(results, inputs, ones, retain_graph=True), device, budget_s
            )
            yield _row(case, dtype, "backward", 2, taken / copies)
    except (RuntimeError, NotImplementedError):  # no such kernel on this device, or too little memory
        return


def _row(case: Case, dtype: Dtype, direction: str, times: int, taken: float) -> dict[str, Any]:
    return {
        "operator": case.operator,
        "direction": direction,
        "dtype": dtype,
        "shape": case.shape,
        "layout": case.layout,
        "flops": float(times * case.flops),
        "bytes": float(times * case.elements * TORCH_DTYPES[dtype].itemsize),
        "seconds": taken,
    }


def _leaves(result: Tensor) -> list[Tensor]:
    """The inputs that a result was computed from and that want gradients."""
    found: list[Tensor] = []
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def cases(kind: str) -> Iterator[Case]:
    """Every operator and shape, for a CPU core or a GPU."""
    large = kind == "cuda"
    yield from _matmuls(large)
    yield from _batched(large)
    yield from _attentions(large)
    yield from _convolutions(large)
    yield from _norms(large)
    yield from _elementwise(large)
    yield from _embeddings(large)
    yield from _optimizers(large)


def _random(*shape: int) -> Callable[[torch.dtype, torch.device], Tensor]:
    return lambda dtype, device: torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)


def _matmuls(large: bool) -> Iterator[Case]:
    rows = (32, 192, 1536, 12288) if large else (16, 96, 768)
    sides = (192, 768, 3072, 6144) if large else (48, 192, 768)
    for m in rows:
        for n in sides:
            for k in sides:

                def build(dtype: torch.dtype, device: torch.device, m: int = m, n: int = n, k: int = k) -> Any:
                    a, weight = _random(m, k)(dtype, device), _random(n, k)(dtype, device)
                    return lambda: F.linear(a, weight)

                yield Case("matmul", (m, n, k), 2 * m * n * k, m * k + k * n + m * n, build)


def _batched(large: bool) -> Iterator[Case]:
    shapes = [(24, 192, 192, 48), (48, 768, 768, 96), (192, 384, 48, 384), (384, 96, 96, 96)] if large else []
    for b, m, n, k in shapes or [(6, 48, 48, 24), (24, 96, 96, 48), (48, 192, 24, 192)]:

        def build(
            dtype: torch.dtype, device: torch.device, b: int = b, m: int = m, n: int = n, k: int = k
        ) -> Callable[[], Tensor]:
            left, right = _random(b, m, k)(dtype, device), _random(b, k, n)(dtype, device)
            return lambda: torch.bmm(left, right)

        yield Case("batched_matmul", (b, m, n, k), 2 * b * m * n * k, b * (m * k + k * n + m * n), build)


def _attentions(large: bool) -> Iterator[Case]:
    shapes = [(2, 10, 384, 64), (6, 20, 768, 64), (3, 24, 1536, 128), (1, 40, 6144, 128)] if large else []
    for batch, heads, sequence, width in shapes or [(1, 3, 48, 32), (2, 6, 96, 64), (1, 4, 384, 64)]:

        def build(
            dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = (batch, heads, sequence, width)
        ) -> Callable[[], Tensor]:
            q, k, v = (_random(*shape)(dtype, device) for _ in range(3))
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

        flops = 2 * batch * heads * sequence**2 * width  # two products, of which the causal half counts
        yield Case("attention", (batch, heads, sequence, width), flops, 4 * batch * heads * sequence * width, build)


def _convolutions(large: bool) -> Iterator[Case]:
    # n, c_in, h, w, c_out, kernel, stride, groups
    shapes = [
        (24, 3, 192, 192, 48, 7, 2, 1),
        (96, 3, 192, 192, 48, 3, 1, 1),
        (24, 48, 96, 96, 96, 3, 1, 1),
        (96, 48, 192, 192, 48, 3, 1, 1),
        (24, 96, 48, 48, 192, 3, 2, 1),
        (96, 96, 96, 96, 96, 3, 1, 1),
        (96, 192, 24, 24, 192, 3, 1, 1),
        (12, 192, 48, 48, 192, 3, 1, 1),
        (96, 384, 24, 24, 96, 1, 1, 1),
        (24, 768, 12, 12, 768, 3, 1, 1),
        (96, 384, 12, 12, 384, 3, 1, 1),
        (12, 384, 48, 48, 384, 3, 1, 1),
        (12, 1536, 48, 48, 192, 3, 1, 1),
        (96, 96, 48, 48, 384, 1, 1, 1),
        (12, 1536, 48, 48, 384, 1, 1, 1),
        (96, 768, 12, 12, 1536, 1, 2, 1),
        (96, 1536, 6, 6, 384, 1, 1, 1),
        (24, 192, 48, 48, 192, 3, 1, 192),
    ]
    small = [
        (6, 1, 24, 24, 12, 5, 1, 1),
        (48, 1, 24, 24, 24, 3, 1, 1),
        (24, 3, 24, 24, 24, 3, 1, 1),
        (12, 24, 12, 12, 48, 3, 1, 1),
        (48, 24, 24, 24, 48, 3, 1, 1),
        (3, 48, 24, 24, 48, 3, 2, 1),
        (6, 96, 12, 12, 48, 1, 1, 1),
        (3, 96, 12, 12, 96, 3, 1, 96),
    ]
    layouts: tuple[Layout, ...] = ("contiguous", "channels_last")
    for shape, layout in product(shapes if large else small, layouts):
        n, c_in, h, w, c_out, kernel, stride, groups = shape

        def build(
            dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = shape, layout: Layout = layout
        ) -> Callable[[], Tensor]:
            n, c_in, h, w, c_out, kernel, stride, groups = shape
            images = _random(n, c_in, h, w)(dtype, device)
            weight = _random(c_out, c_in // groups, kernel, kernel)(dtype, device)
            if layout == "channels_last":
                images, weight = (
                    tensor.detach().to(memory_format=torch.channels_last).requires_grad_()
                    for tensor in (images, weight)
                )
            return lambda: F.conv2d(images, weight, stride=stride, padding=kernel // 2, groups=groups)

        out = n * c_out * -(-h // stride) * -(-w // stride)
        per_output = c_in // groups * kernel * kernel
        moved = n * c_in * h * w + c_out * per_output + out
        yield Case("convolution", shape, 2 * out * per_output, moved, build, layout=layout)


def _norms(large: bool) -> Iterator[Case]:
    for rows, columns in ((96, 192), (1536, 768), (12288, 3072)) if large else ((24, 96), (192, 384)):

        def layer(
            dtype: torch.dtype, device: torch.device, rows: int = rows, columns: int = columns
        ) -> Callable[[], Tensor]:
            x, weight = _random(rows, columns)(dtype, device), _random(columns)(dtype, device)
            return lambda: F.layer_norm(x, (columns,), weight, weight)

        yield Case("norm", (rows, columns), 8 * rows * columns, 2 * rows * columns, layer)
    for shape in ((24, 48, 24, 24), (24, 96, 96, 96)) if large else ((6, 12, 12, 12), (12, 24, 24, 24)):

        def batch(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = shape) -> Callable[[], Tensor]:
            x, weight = _random(*shape)(dtype, device), torch.ones(shape[1], device=device, requires_grad=True)
            return lambda: F.batch_norm(x, None, None, weight, weight, training=True)

        elements = shape[0] * shape[1] * shape[2] * shape[3]
        yield Case("norm", shape, 8 * elements, 2 * elements, batch)


def _elementwise(large: bool) -> Iterator[Case]:
    for elements in (3 * 2**10, 3 * 2**15, 3 * 2**20, 3 * 2**25) if large else (3 * 2**8, 3 * 2**13, 3 * 2**18):

        def build(dtype: torch.dtype, device: torch.device, elements: int = elements) -> Callable[[], Tensor]:
            x = _random(elements)(dtype, device)
            return lambda: F.relu(x)

        yield Case("elementwise", (elements,), elements, 2 * elements, build)


def _embeddings(large: bool) -> Iterator[Case]:
    shapes = [(12288, 384, 768), (49152, 768, 6144)] if large else [(768, 96, 192), (6144, 192, 768)]
    for rows, columns, lookups in shapes:

        def build(
            dtype: torch.dtype,
            device: torch.device,
            rows: int = rows,
            columns: int = columns,
            lookups: int = lookups,
        ) -> Callable[[], Tensor]:
            table = _random(rows, columns)(dtype, device)
            chosen = torch.randint(rows, (lookups,), device=device)
            return lambda: F.embedding(chosen, table)

        yield Case("embedding", (rows, columns, lookups), 0, 2 * lookups * columns, build)


def _optimizers(large: bool) -> Iterator[Case]:
    for tensors, elements in ((12, 3 * 2**10), (96, 3 * 2**15), (24, 3 * 2**20)) if large else ((12, 768), (12, 49152)):

        def build(
            dtype: torch.dtype, device: torch.device, tensors: int = tensors, elements: int = elements
        ) -> Callable[[], Tensor]:
            weights = [torch.randn(elements, dtype=dtype, device=device, requires_grad=True) for _ in range(tensors)]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer = torch.optim.AdamW(weights)

            def step() -> Tensor:
                optimizer.step()
                return weights[0]

            return step

        # weight, gradient and two moments are read, all but the gradient are written
        yield Case("optimizer", (tensors, elements), 12 * tensors * elements, 7 * tensors * elements, build, False)

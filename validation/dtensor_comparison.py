"""Compares `ShardView` with torch's DTensor on two CPU ranks: overhead per operator, and what unedited model code gets.

    python dtensor_comparison.py            # from the repository, whose tests/ranks.py starts the ranks

Overhead: CPU microseconds per call, median over 7 runs of 200 calls, on tensors too small for arithmetic to count.
Behaviour: whether the result is that of the plain tensor, its placement and the collectives that ran, or the error.
"""

import logging
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.parallel.differentiable_collectives import AxisGroup, slice_of_rank
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, full_tensor
from meshwright.profile.structure.split_rules import DividedDimension
from tests.ranks import run_ranks

B, T, C, HEADS = 2, 4, 16, 4
CALLS, RUNS = 200, 7
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single")


class Kinds:
    """Makes the same tensor plain, as a DTensor and as a ShardView. `dim` None is a replicated tensor."""

    def __init__(self, rank: int, size: int) -> None:
        assert dist.group.WORLD is not None
        self.mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
        self.group = AxisGroup(dist.group.WORLD, rank, size)

    def plain(self, x: Tensor, dim: int | None, parts: int = 1) -> Tensor:
        return x

    def dtensor(self, x: Tensor, dim: int | None, parts: int = 1) -> Tensor:
        return distribute_tensor(x, self.mesh, [Replicate() if dim is None else Shard(dim)])

    def unwrapped_dtensor(self, x: Tensor, dim: int | None, parts: int = 1) -> Tensor:
        """As an unedited model has it: what is not sharded stays a plain tensor."""
        return x if dim is None else self.dtensor(x, dim)

    def shard_view(self, x: Tensor, dim: int | None, parts: int = 1) -> Tensor:
        if dim is None:
            return x
        dim %= x.dim()
        spec = ShardSpec(DividedDimension(dim, parts, x.shape[dim] // parts, 1), self.group)
        return ShardView(slice_of_rank(x, spec.ranges, self.group.rank), spec, tuple(x.shape))


Make = Callable[..., Tensor]


# ---- overhead


def operators(make: Make) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    x, y = make(torch.randn(B, T, C), 2), make(torch.randn(B, T, C), 2)
    full, weight = make(torch.randn(B, T, C), None), make(torch.randn(C, C), 0)
    heads = make(torch.randn(B, HEADS, T, T), 1)
    return {
        "add": lambda: x + y,
        "view + transpose": lambda: x.view(B, T, HEADS, C // HEADS).transpose(1, 2),
        "linear (column)": lambda: F.linear(full, weight),
        "softmax": lambda: heads.softmax(-1),
        "gelu": lambda: F.gelu(x),
    }


def microseconds(call: Callable[[], Any]) -> float:
    for _ in range(50):
        call()
    runs = []
    for _ in range(RUNS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        runs.append((time.process_time() - begin) / CALLS * 1e6)
    return statistics.median(runs)


def overhead(rank: int, size: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    kinds = Kinds(rank, size)
    makes = {"plain": kinds.plain, "ShardView": kinds.shard_view, "DTensor": kinds.dtensor}
    with torch.no_grad():
        calls = {kind: operators(make) for kind, make in makes.items()}
        return {name: {kind: microseconds(calls[kind][name]) for kind in makes} for name in calls["plain"]}


# ---- behaviour


def split_heads(make: Make) -> Tensor:
    return make(torch.randn(B, T, C), 2).view(B, T, HEADS, C // HEADS).transpose(1, 2)


def split_uneven_heads(make: Make) -> Tensor:
    return make(torch.randn(B, T, 15), 2).view(B, T, 3, 5).transpose(1, 2)


def fused_qkv(make: Make) -> Any:
    x, weight = make(torch.randn(B, T, C), None), make(torch.randn(3 * C, C), 0, 3)
    return F.linear(x, weight).split(C, dim=2)


def fused_qkv_reshape(make: Make) -> Any:
    x, weight = make(torch.randn(B, T, C), None), make(torch.randn(3 * C, C), 0, 3)
    return F.linear(x, weight).reshape(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)


def causal_mask_made_in_forward(make: Make) -> Tensor:
    scores = make(torch.randn(B, HEADS, T, T), 1)
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)


def add_plain_bias(make: Make) -> Tensor:
    return make(torch.randn(B, T, C), 2) + torch.randn(C)


def attention(make: Make) -> Tensor:
    q, k, v = (make(torch.randn(B, HEADS, T, C), 1) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def row_linear(make: Make) -> Tensor:
    return F.linear(make(torch.randn(B, T, C), 2), make(torch.randn(C, C), 1), make(torch.randn(C), None))


def in_place(make: Make) -> Tensor:
    x = make(torch.randn(B, T, C), 2)
    x += make(torch.randn(B, T, C), 2)
    return F.relu(x, inplace=True)


def in_place_with_full_tensor(make: Make) -> Tensor:
    x = make(torch.randn(B, T, C), 2)
    x += make(torch.randn(B, T, C), None)
    return x


def uneven_linear(make: Make) -> Tensor:
    return F.linear(make(torch.randn(B, T, C), None), make(torch.randn(37, C), 0))


def uneven_flatten(make: Make) -> Tensor:
    return make(torch.randn(B, T, 37), 2).view(-1, 37)


def flatten_heads(make: Make) -> Tensor:
    return make(torch.randn(B, HEADS, T, 4), 1).transpose(1, 2).reshape(B, T, C)


def convolution_output_channels(make: Make) -> Tensor:
    return F.conv2d(make(torch.randn(B, 4, 8, 8), None), make(torch.randn(6, 4, 3, 3), 0), padding=1)


def convolution_input_channels(make: Make) -> Tensor:
    return F.conv2d(make(torch.randn(B, 4, 8, 8), 1), make(torch.randn(6, 4, 3, 3), 1), padding=1)


CASES = (
    split_heads, split_uneven_heads, fused_qkv, fused_qkv_reshape, causal_mask_made_in_forward, add_plain_bias,
    attention, flatten_heads, row_linear, in_place, in_place_with_full_tensor, uneven_linear, uneven_flatten,
    convolution_output_channels, convolution_input_channels,
)  # fmt: skip


def behaviour(rank: int, size: int) -> list[tuple[str, dict[str, str]]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kinds = Kinds(rank, size)
    rows = []
    for case in CASES:
        torch.manual_seed(0)
        expected = case(kinds.plain)
        expected = expected if isinstance(expected, tuple) else (expected,)
        row = {}
        for name, make in {
            "ShardView": kinds.shard_view,
            "DTensor": kinds.dtensor,
            "DTensor, rest plain": kinds.unwrapped_dtensor,
        }.items():
            row[name] = outcome(case, make, expected)
        rows.append((case.__name__, row))
    return rows


def outcome(case: Callable[[Make], Any], make: Make, expected: tuple[Tensor, ...]) -> str:
    torch.manual_seed(0)
    ready = iter([make(*args) for args in _arguments(case)])  # before counting: distribute_tensor communicates too
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    with torch.no_grad():
        try:
            with CommDebugMode() as debug, _counted(counts):
                result = case(lambda *_: next(ready))
            results = result if isinstance(result, tuple) else (result,)
            full = [_full(tensor) for tensor in results]
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    counts.update({str(op).rsplit(".", 1)[-1]: n for op, n in debug.get_comm_counts().items()})
    collectives = ", ".join(f"{n} {op}" for op, n in counts.items()) or "none"
    shapes = [tuple(tensor.shape) for tensor in full]
    if shapes != [tuple(tensor.shape) for tensor in expected]:
        verdict = f"WRONG: shape {shapes[0]} instead of {tuple(expected[0].shape)}"
    else:
        largest = max(float((a - b).abs().nan_to_num().max()) for a, b in zip(full, expected, strict=True))
        verdict = "right" if largest < 1e-5 else f"WRONG: error {largest:.1g}"
    return f"{verdict}; {_layout(results[0])}; collectives: {collectives}"


def _arguments(case: Callable[[Make], Any]) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def record(x: Tensor, *args: Any) -> Tensor:
        calls.append((x.clone(), *args))
        return x

    case(record)
    return calls


class _counted:
    def __init__(self, counts: Counter[str]) -> None:
        self.patches = [patch.object(dist, name, self._counting(name, counts)) for name in COLLECTIVES]

    def _counting(self, name: str, counts: Counter[str]) -> Any:
        original = getattr(dist, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return counting

    def __enter__(self) -> None:
        for patched in self.patches:
            patched.start()

    def __exit__(self, *_: object) -> None:
        for patched in self.patches:
            patched.stop()


def _full(x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        return x.full_tensor()
    return full_tensor(x) if isinstance(x, ShardView) else x


def _layout(x: Tensor) -> str:
    if isinstance(x, DTensor):
        return f"{tuple(x.placements)}"
    return f"sharded by dim {x.spec.shard.dim}" if isinstance(x, ShardView) else "replicated"


# ---- DTensor with its own remedies for unedited models


def remedies(rank: int, size: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kinds = Kinds(rank, size)
    torch.manual_seed(0)
    results: dict[str, str] = {}
    for case in (mask_with_implicit_replication, dropout, smoothed_loss, encoder_layer):
        try:
            results[case.__name__] = case(kinds)
        except Exception as error:
            results[case.__name__] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return results


def mask_with_implicit_replication(kinds: Kinds) -> str:
    with implicit_replication():
        scores = kinds.dtensor(torch.randn(B, HEADS, T, T), 1)
        return str(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).placements)  # type: ignore[attr-defined]


def dropout(kinds: Kinds) -> str:
    local = F.dropout(kinds.dtensor(torch.ones(2, 64), 1), 0.5).to_local()  # type: ignore[attr-defined]
    gathered = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(gathered, local.contiguous())
    return f"the two ranks drop the same elements of their shards: {torch.equal(*gathered)}"


def smoothed_loss(kinds: Kinds) -> str:
    with loss_parallel():
        return str(F.cross_entropy(kinds.dtensor(torch.randn(6, 37), 1), torch.randint(37, (6,)), label_smoothing=0.1))


def encoder_layer(kinds: Kinds) -> str:
    """torch's own layer, with the weights sharded as tensor parallelism needs."""
    layer = nn.TransformerEncoderLayer(C, HEADS, 2 * C, 0.0, batch_first=True)
    for name, module in list(layer.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            column = "in_proj" in key or name == "linear1"
            row = name in ("self_attn.out_proj", "linear2") and key == "weight"
            sharded = kinds.dtensor(parameter.detach(), 0 if column else 1 if row else None)
            module.register_parameter(key, nn.Parameter(sharded))
    return str(layer(kinds.dtensor(torch.randn(B, T, C), None)).placements)


def main() -> None:
    print("torch", torch.__version__)
    tables = [run_ranks(overhead, 2) for _ in range(3)]
    print("\nmicroseconds of CPU time per call, median of 3 worlds (overhead in brackets)")
    for name in tables[0][0]:
        value = {
            kind: statistics.median(result[name][kind] for table in tables for result in table)
            for kind in ("plain", "ShardView", "DTensor")
        }
        print(
            f"{name:18} plain {value['plain']:6.1f}"
            + "".join(f"  {k} {value[k]:6.1f} (+{value[k] - value['plain']:.1f})" for k in ("ShardView", "DTensor"))
        )
    print()
    for name, row in run_ranks(behaviour, 2)[0]:
        print(name)
        for kind, text in row.items():
            print(f"    {kind:20} {text}")
    print()
    for name, text in run_ranks(remedies, 2)[0].items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()

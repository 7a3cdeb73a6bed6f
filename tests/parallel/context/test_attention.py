"""Attention over ranks is that of one rank: output and gradients, for both exchanges."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshwright.parallel.context.exchange import Exchange
from meshwright.parallel.context.sequence_view import balanced_tokens, divide_sequence, gather_sequence_views
from meshwright.parallel.differentiable_collectives import AxisGroup
from tests.ranks import RankPool

BATCH, HEADS, WIDTH = 2, 4, 8
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "odd length": {"is_causal": True, "length": 29},
    "grouped heads": {"is_causal": True, "kv_heads": 2},
    "padding": {"mask": "padding"},
    "window": {"mask": "window"},
    "documents": {"mask": "documents"},
    "bias": {"mask": "bias"},
    "bias of heads": {"mask": "bias of heads"},
    "learned bias": {"mask": "learned bias"},
    "a query without keys": {"mask": "nothing"},
    "scale": {"scale": 0.3},
    "wide values": {"value_width": 12},
    "fewer keys": {"key_length": 17},
}


def context_group(ranks: int) -> AxisGroup:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    return AxisGroup(mesh.get_group("context"), mesh.get_local_rank("context"), ranks, "context")


def make_mask(kind: str | None, length: int, keys: int) -> Tensor | None:
    rows, columns = torch.arange(length)[:, None], torch.arange(keys)
    causal = columns <= rows
    match kind:
        case None:
            return None
        case "padding":
            return (columns < torch.tensor([keys, keys - 9])[:, None, None, None]).expand(2, 1, 1, keys)
        case "window":
            return causal & (columns > rows - 5)
        case "documents":
            return causal & (rows // 7 == columns // 7)
        case "nothing":
            return causal & (rows != 3)
        case "bias":
            return torch.randn(length, keys, dtype=torch.float64)
        case _:
            return torch.randn(1, HEADS, length, keys, dtype=torch.float64)


def results(group: AxisGroup, exchange: Exchange, case: dict[str, Any]) -> list[float]:
    """The largest differences of output and gradients from those of one rank."""
    torch.manual_seed(0)
    length = case.get("length", 32)
    key_length, kv_heads = case.get("key_length", length), case.get("kv_heads", HEADS)
    value_width = case.get("value_width", WIDTH)
    shapes = [(HEADS, length, WIDTH), (kv_heads, key_length, WIDTH), (kv_heads, key_length, value_width)]
    tensors = [torch.randn(BATCH, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = make_mask(case.get("mask"), length, key_length)
    if case.get("mask") == "learned bias":
        assert mask is not None
        tensors.append(mask.requires_grad_())
    weight = torch.randn(BATCH, HEADS, length, value_width, dtype=torch.float64)
    options: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": case.get("is_causal", False),
        "scale": case.get("scale"),
        "enable_gqa": kv_heads != HEADS,
    }
    query, key, value = tensors[:3]
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    (expected * weight).sum().backward()
    expected_grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    query, key, value = (divide_sequence(tensor, 2, group, exchange) for tensor in (query, key, value))
    full = gather_sequence_views(F.scaled_dot_product_attention(query, key, value, **options))
    (full * weight).sum().backward()
    differences = [float((full - expected).detach().abs().max())]
    for tensor, grad in zip(tensors, expected_grads, strict=True):
        # Each rank has a part of the gradient; all ranks start with 1, so that their mean is the gradient.
        assert tensor.grad is not None
        assert grad is not None
        torch.distributed.all_reduce(tensor.grad)
        differences.append(float((tensor.grad / group.size - grad).abs().max()))
    return differences


def all_results(rank: int, ranks: int) -> dict[str, list[float]]:
    group = context_group(ranks)
    exchanges: tuple[Exchange, ...] = ("all_gather", "ring")
    return {
        f"{name}, {exchange}": results(group, exchange, case)
        for (name, case), exchange in product(CASES.items(), exchanges)
    }


@pytest.mark.parametrize("world", ["two", "three"])
def test_output_and_gradients_are_those_of_one_rank(world: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(world)
    for by_case in pool.run(all_results):
        assert {name: differences for name, differences in by_case.items() if max(differences) > 1e-12} == {}


def dropout_results(rank: int, ranks: int, exchange: Exchange) -> tuple[float, float]:
    """The mean of values of ones under dropout, and how far a numerical derivative is from the gradient."""
    group = context_group(ranks)
    torch.manual_seed(1)
    query, key = (torch.randn(1, 2, 64, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ones = torch.ones(1, 2, 64, WIDTH, dtype=torch.float64)
    direction = torch.randn(query.shape, dtype=torch.float64)

    def output(step: float) -> Tensor:
        torch.manual_seed(2)
        inputs = (query + step * direction, key, ones * torch.arange(8))
        q, k, v = (divide_sequence(x, 2, group, exchange) for x in inputs)
        full: Tensor = gather_sequence_views(F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True))
        return full

    full = output(0.0)
    full.square().sum().backward()
    assert query.grad is not None
    torch.distributed.all_reduce(query.grad)
    slope = float((query.grad / ranks * direction).sum())
    with torch.no_grad():
        measured = float((output(1e-5).square().sum() - output(-1e-5).square().sum()) / 2e-5)
    return float(full[..., 1].mean()), abs(slope - measured) / abs(measured)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_dropout_keeps_the_mean_and_has_the_gradient_of_its_own_mask(two: RankPool, exchange: Exchange) -> None:
    for mean, error in two.run(dropout_results, exchange):
        assert 0.85 < mean < 1.15
        assert error < 1e-6


def test_causal_work_is_divided_evenly() -> None:
    for ranks in (2, 3, 8):
        work = [
            sum(first * length + length * length / 2 for first, length in ranges)
            for ranges in balanced_tokens(48 * ranks, ranks)
        ]
        assert max(work) == min(work)

"""Models under tensor parallelism compute what they compute on one rank: outputs and gradients, in training and in
evaluation, whatever sizes their code spells out."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.blocks.recompute import recompute_blocks
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import whole_of
from meshwright.plan import Axes, Modules, Plan
from meshwright.profile.structure.structure import structure
from tests.parallel.tensor.models import make
from tests.ranks import RankPool
from tests.soaked import all_but

TOLERANCE = 1e-9


def scores(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output[0]
    assert type(found) is Tensor
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def split(
    name: str, world_size: int, **modules: Any
) -> tuple[nn.Module, nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The untouched model, the split one, their arguments, and the layouts with their group."""
    model, args, kwargs = make(name)
    plan = Plan(axes=Axes(tensor=world_size), modules=Modules(**modules))
    found = structure(
        model,
        {k: v for k, v in kwargs.items() if isinstance(v, Tensor)} if kwargs else (*args, torch.zeros(len(args[0]))),
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, found, mesh)
    return model, parallel, args, kwargs, (layouts, mesh.get_group("tensor"))


def gradient_errors(model: nn.Module, parallel: nn.Module, laid: Any) -> dict[str, float]:
    layouts, group = laid
    wanted = {name: p.grad for name, p in model.named_parameters()}
    errors = {}
    scale = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, parameter in parallel.named_parameters():
        grad = parameter.grad
        assert (grad is None) == (wanted[name] is None), name
        if grad is None:
            continue
        whole = whole_of(grad, layouts[name], group) if name in layouts else grad
        right = wanted[name]
        assert right is not None
        assert whole.shape == right.shape, name
        errors[name] = float((whole - right).abs().max() / max(float(right.abs().max()), 1e-6 * scale))
    assert errors.keys() == {name for name, grad in wanted.items() if grad is not None}
    return errors


def worst(
    rank: int, world_size: int, name: str, recompute: str, modules: dict[str, Any]
) -> tuple[float, list[str], list[str]]:
    """The largest error of outputs and gradients; the names that are split, and those that are wrong."""
    model, parallel, args, kwargs, laid = split(name, world_size, **modules)
    if recompute != "none":
        recompute_blocks(parallel, recompute)  # type: ignore[arg-type]
    biggest, wrong = 0.0, []
    for _ in range(2):
        results = []
        for each in (model, parallel):
            each.zero_grad()
            inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
            out = scores(each(*inputs, **kwargs))
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view(out.shape)
            (out * weights).sum().backward()
            results.append((out, [i.grad for i in inputs if i.requires_grad]))
        (right, right_grads), (found, grads) = results
        biggest = max(biggest, error(found, right), *(error(a, b) for a, b in zip(grads, right_grads, strict=True)))
        errors = gradient_errors(model, parallel, laid)
        wrong += [f"{n}: {e:.1e}" for n, e in errors.items() if e > TOLERANCE]
        biggest = max(biggest, *errors.values())
        for each in (model, parallel):
            each.eval()
        with torch.no_grad():
            biggest = max(biggest, error(scores(parallel(*args, **kwargs)), scores(model(*args, **kwargs))))
        for each in (model, parallel):
            each.train()
    assert not any("Part" in type(p).__name__ for p in parallel.parameters())
    return biggest, sorted(laid[0]), wrong


def check(pool: RankPool, name: str, recompute: str = "none", **modules: Any) -> None:
    for biggest, names, wrong in pool.run(worst, name, recompute, modules):
        assert not wrong
        assert biggest < TOLERANCE
        assert names


HERE = ["nano", "llama", "decoder", "small", "conv1d", "own", "post", "pre", "mlp"]
LIBRARY = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "DebertaV2ForMaskedLM",
    "t5",
]


@pytest.mark.parametrize("name", all_but(["nano", "llama", "post"], HERE))
def test_outputs_and_gradients_are_those_of_the_untouched_model(two: RankPool, name: str) -> None:
    check(two, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nano", "small", "post"])
def test_four_ranks(four: RankPool, name: str) -> None:
    check(four, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", LIBRARY)
def test_models_of_the_transformers_library(two: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    check(two, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["swin", "swin2"])
def test_tables_by_relative_position(two: RankPool, name: str) -> None:
    check(two, name)


@pytest.mark.parametrize(
    "name", all_but(["nano", "llama"], ["nano", "llama", "decoder", "pre", "small", "own", "swin"])
)
def test_activations_divided_along_the_sequence(two: RankPool, name: str) -> None:
    check(two, name, sequence=True)


@pytest.mark.soak
def test_a_sequence_that_the_ranks_do_not_divide(four: RankPool) -> None:
    check(four, "nano", sequence=True)  # six places for four ranks


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), [("nano", "full"), ("nano", "selective"), ("post", "full")])
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_that_are_computed_again(two: RankPool, name: str, kind: str, sequence: bool) -> None:
    check(two, name, kind, sequence=sequence)


def sharded(rank: int, world_size: int, sequence: bool, recompute: str) -> float:
    """FSDP over the parts, two ranks each; the largest error of a gradient."""
    model, args, _ = make("nano")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    plan = Plan(axes=Axes(shard=2, tensor=2), modules=Modules(sequence=sequence))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, structure(model, (*args, torch.zeros(3))), mesh)
    recompute_blocks(parallel, recompute)  # type: ignore[arg-type]
    for block in (*parallel.h, parallel):  # type: ignore[misc]
        fully_shard(block, mesh=mesh["shard"])
    for each in (model, parallel):
        out = each(*args)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view(out.shape)).sum().backward()
    wanted = dict(model.named_parameters())
    found = 0.0
    for name, parameter in parallel.named_parameters():
        grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
        if name in layouts:
            grad = whole_of(grad, layouts[name], mesh.get_group("tensor"))
        right = wanted[name].grad
        assert right is not None
        found = max(found, float((grad - right).abs().max() / right.abs().max()))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_can_be_sharded(four: RankPool, sequence: bool, recompute: str) -> None:
    assert max(four.run(sharded, sequence, recompute)) < TOLERANCE

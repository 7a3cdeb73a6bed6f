"""Models under tensor parallelism compute what they compute on one rank: outputs and gradients, in training and in
evaluation, whatever sizes their code contains."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.blocks.recompute import recompute_blocks
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import gather_shards
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules
from meshwright.profile.structure.structure import find_structure
from tests.parallel.tensor.models import make
from tests.ranks import RankPool
from tests.soaked import all_but

TOLERANCE = 1e-9


def logits_of(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[0]
    assert type(logits) is Tensor
    return logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def split(
    name: str, world_size: int, **modules: Any
) -> tuple[nn.Module, nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The unsplit model, the split one, their arguments, and the layouts with their process group."""
    model, args, kwargs = make(name)
    plan = Plan(axes=Axes(tensor=world_size), modules=Modules(**modules))
    structure = find_structure(
        model,
        {k: v for k, v in kwargs.items() if isinstance(v, Tensor)} if kwargs else (*args, torch.zeros(len(args[0]))),
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, structure, mesh)
    return model, parallel, args, kwargs, (layouts, mesh.get_group("tensor"))


def gradient_errors(model: nn.Module, parallel: nn.Module, layouts_and_group: Any) -> dict[str, float]:
    layouts, group = layouts_and_group
    expected = {name: p.grad for name, p in model.named_parameters()}
    errors = {}
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, parameter in parallel.named_parameters():
        grad = parameter.grad
        assert (grad is None) == (expected[name] is None), name
        if grad is None:
            continue
        full = gather_shards(grad, layouts[name], group) if name in layouts else grad
        expected_grad = expected[name]
        assert expected_grad is not None
        assert full.shape == expected_grad.shape, name
        largest = max(float(expected_grad.abs().max()), 1e-6 * scale)
        errors[name] = float((full - expected_grad).abs().max() / largest)
    assert errors.keys() == {name for name, grad in expected.items() if grad is not None}
    return errors


def compare_to_unsplit(
    rank: int, world_size: int, name: str, recompute: str, modules: dict[str, Any]
) -> tuple[float, list[str], list[str]]:
    """The largest error of outputs and gradients, the names that are split, and the gradients that are wrong."""
    model, parallel, args, kwargs, layouts_and_group = split(name, world_size, **modules)
    if recompute != "none":
        recompute_blocks(parallel, recompute)  # type: ignore[arg-type]
    largest_error, wrong = 0.0, []
    for _ in range(2):
        results = []
        for candidate in (model, parallel):
            candidate.zero_grad()
            inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
            out = logits_of(candidate(*inputs, **kwargs))
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view(out.shape)
            (out * weights).sum().backward()
            results.append((out, [i.grad for i in inputs if i.requires_grad]))
        (expected, expected_grads), (actual, actual_grads) = results
        input_errors = [relative_error(a, b) for a, b in zip(actual_grads, expected_grads, strict=True)]
        largest_error = max(largest_error, relative_error(actual, expected), *input_errors)
        errors = gradient_errors(model, parallel, layouts_and_group)
        wrong += [f"{n}: {e:.1e}" for n, e in errors.items() if e > TOLERANCE]
        largest_error = max(largest_error, *errors.values())
        for candidate in (model, parallel):
            candidate.eval()
        with torch.no_grad():
            evaluated, expected = logits_of(parallel(*args, **kwargs)), logits_of(model(*args, **kwargs))
            largest_error = max(largest_error, relative_error(evaluated, expected))
        for candidate in (model, parallel):
            candidate.train()
    assert not any(isinstance(p, ShardView) for p in parallel.parameters()), "parameters are replaced in forward only"
    return largest_error, sorted(layouts_and_group[0]), wrong


def check(pool: RankPool, name: str, recompute: str = "none", **modules: Any) -> None:
    for largest_error, names, wrong in pool.run(compare_to_unsplit, name, recompute, modules):
        assert not wrong
        assert largest_error < TOLERANCE
        assert names


MODELS_WRITTEN_HERE = ["nano", "llama", "decoder", "small", "conv1d", "own", "post", "pre", "mlp"]
TRANSFORMERS_MODELS = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "DebertaV2ForMaskedLM",
    "t5",
]


@pytest.mark.parametrize("name", all_but(["nano", "llama", "post"], MODELS_WRITTEN_HERE))
def test_outputs_and_gradients_are_those_of_the_unsplit_model(two: RankPool, name: str) -> None:
    check(two, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nano", "small", "post"])
def test_four_ranks(four: RankPool, name: str) -> None:
    check(four, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
def test_models_of_the_transformers_library(two: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    check(two, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["swin", "swin2"])
def test_tables_of_relative_positions_are_split_by_heads(two: RankPool, name: str) -> None:
    check(two, name)


@pytest.mark.parametrize(
    "name", all_but(["nano", "llama"], ["nano", "llama", "decoder", "pre", "small", "own", "swin"])
)
def test_sequence_parallel_activations(two: RankPool, name: str) -> None:
    check(two, name, sequence=True)


@pytest.mark.soak
def test_a_sequence_whose_length_the_ranks_do_not_divide(four: RankPool) -> None:
    check(four, "nano", sequence=True)  # length 6 on 4 ranks


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), [("nano", "full"), ("nano", "selective"), ("post", "full")])
@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks(two: RankPool, name: str, kind: str, sequence: bool) -> None:
    check(two, name, kind, sequence=sequence)


def largest_error_with_fsdp(rank: int, world_size: int, sequence: bool, recompute: str) -> float:
    """FSDP2 over two ranks of each shard. Returns the largest error of a gradient."""
    model, args, _ = make("nano")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    plan = Plan(axes=Axes(shard=2, tensor=2), modules=Modules(sequence=sequence))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, find_structure(model, (*args, torch.zeros(3))), mesh)
    recompute_blocks(parallel, recompute)  # type: ignore[arg-type]
    for block in (*parallel.h, parallel):  # type: ignore[misc]
        fully_shard(block, mesh=mesh["shard"])
    for candidate in (model, parallel):
        out = candidate(*args)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view(out.shape)).sum().backward()
    unsplit = dict(model.named_parameters())
    largest_error = 0.0
    for name, parameter in parallel.named_parameters():
        grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
        if name in layouts:
            grad = gather_shards(grad, layouts[name], mesh.get_group("tensor"))
        expected = unsplit[name].grad
        assert expected is not None
        largest_error = max(largest_error, float((grad - expected).abs().max() / expected.abs().max()))
    return largest_error


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_weights_can_be_sharded_by_fsdp(four: RankPool, sequence: bool, recompute: str) -> None:
    assert max(four.run(largest_error_with_fsdp, sequence, recompute)) < TOLERANCE

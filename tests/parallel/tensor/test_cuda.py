"""Tensor parallelism on a GPU that several ranks share, over Gloo, which lacks some collectives for CUDA tensors."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import gather_shards
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules
from meshwright.profile.structure.structure import find_structure
from tests.parallel.tensor.models import NanoGPT, make, words
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def largest_gradient_error(rank: int, world_size: int, name: str, sequence: bool) -> float:
    model, args, _ = make(name)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    plan = Plan(axes=Axes(tensor=world_size), modules=Modules(sequence=sequence))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, find_structure(model, (*args, torch.zeros(3))), mesh)
    for candidate in (model, parallel):
        out = candidate.cuda()(*(argument.cuda() for argument in args))
        (
            out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device="cuda").cos().view(out.shape)
        ).sum().backward()
    largest_error = 0.0
    unsplit = dict(model.named_parameters())
    for key, parameter in parallel.named_parameters():
        grad, expected = parameter.grad, unsplit[key].grad
        assert grad is not None
        assert expected is not None
        full = gather_shards(grad, layouts[key], mesh.get_group("tensor")) if key in layouts else grad
        largest_error = max(largest_error, float((full - expected).abs().max() / expected.abs().max()))
    return largest_error


@pytest.mark.parametrize("name", ["nano", "llama", "post"])
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_those_of_the_unsplit_model(two: RankPool, name: str, sequence: bool) -> None:
    assert max(two.run(largest_gradient_error, name, sequence)) < 1e-9


def step_with_dropout(rank: int, world_size: int) -> tuple[bytes, float]:
    torch.manual_seed(0)
    model = NanoGPT(0.3)
    tokens = words()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    split_modules([model], Plan(axes=Axes(tensor=world_size)), find_structure(model, (tokens, torch.zeros(3))), mesh)
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16):
        out = model.cuda()(tokens.cuda())
    out.float().sum().backward()
    return torch.cuda.get_rng_state().numpy().tobytes(), float(out.float().sum().detach())


def test_generators_stay_in_the_same_state(two: RankPool) -> None:
    left, right = two.run(step_with_dropout)
    assert left == right

"""The same on a GPU that several ranks share, over Gloo: it lacks some collectives for CUDA tensors."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import whole_of
from meshwright.plan import Axes, Modules, Plan
from meshwright.profile.structure.structure import structure
from tests.parallel.tensor.models import NanoGPT, make, words
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def worst(rank: int, world_size: int, name: str, sequence: bool) -> float:
    model, args, _ = make(name)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    plan = Plan(axes=Axes(tensor=world_size), modules=Modules(sequence=sequence))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, structure(model, (*args, torch.zeros(3))), mesh)
    for each in (model, parallel):
        out = each.cuda()(*(argument.cuda() for argument in args))
        (
            out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device="cuda").cos().view(out.shape)
        ).sum().backward()
    found = 0.0
    wanted = dict(model.named_parameters())
    for key, parameter in parallel.named_parameters():
        grad, right = parameter.grad, wanted[key].grad
        assert grad is not None
        assert right is not None
        whole = whole_of(grad, layouts[key], mesh.get_group("tensor")) if key in layouts else grad
        found = max(found, float((whole - right).abs().max() / right.abs().max()))
    return found


@pytest.mark.parametrize("name", ["nano", "llama", "post"])
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_those_of_the_untouched_model(two: RankPool, name: str, sequence: bool) -> None:
    assert max(two.run(worst, name, sequence)) < 1e-9


def dropped(rank: int, world_size: int) -> tuple[bytes, float]:
    torch.manual_seed(0)
    model = NanoGPT(0.3)
    tokens = words()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    split_modules([model], Plan(axes=Axes(tensor=world_size)), structure(model, (tokens, torch.zeros(3))), mesh)
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16):
        out = model.cuda()(tokens.cuda())
    out.float().sum().backward()
    return torch.cuda.get_rng_state().numpy().tobytes(), float(out.float().sum().detach())


def test_generators_stay_in_step(two: RankPool) -> None:
    left, right = two.run(dropped)
    assert left == right

"""A few huge layers split over the replicate axis: every rank keeps its own samples, the weights of these layers are
split, and gradients are those of the mean loss, also where ranks have different numbers of samples."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import gather_shards
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules, Split
from meshwright.profile.structure.split_rules import DividedDimension
from meshwright.profile.structure.structure import find_structure
from tests.parallel.tensor.models import Classifier
from tests.ranks import RankPool, ranks

CHAIN = {"classifier.0": "column", "classifier.3": "row", "classifier.6": "column"}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with ranks(request.param) as rank_pool:
        yield rank_pool


def build(world_size: int, kinds: dict[str, str], dropout: float = 0.0) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = Classifier(dropout).double()
    splits = {name: Split(kind=kind, axis="replicate") for name, kind in kinds.items()}  # type: ignore[arg-type]
    plan = Plan(axes=Axes(replicate=world_size), modules=Modules(splits=splits))
    structure = find_structure(model, (torch.zeros(2, 2, 4, 4, dtype=torch.float64), torch.zeros(2)))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    parallel = copy.deepcopy(model)
    return model, parallel, split_modules([parallel], plan, structure, mesh), mesh.get_group("replicate")


def batches(world_size: int) -> list[Tensor]:
    """Rank r has r + 1 samples."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r + 1, 2, 4, 4, dtype=torch.float64, generator=generator) for r in range(world_size)]


def loss_of(output: Tensor) -> Tensor:
    return (output.sin() * torch.arange(output.shape[1])).sum()


def errors_by_name(rank: int, world_size: int, kinds: dict[str, str]) -> tuple[dict[str, float], list[str], list[str]]:
    model, parallel, layouts, group = build(world_size, kinds)
    xs = batches(world_size)
    count = sum(len(x) for x in xs)
    (loss_of(model(torch.cat(xs))) / count).backward()
    calls: list[str] = []
    with _RecordedCollectives(calls):
        out = parallel(xs[rank])
    errors = {"output": float((out - model(xs[rank])).abs().max())}
    (loss_of(out) * world_size / count).backward()
    unsplit = dict(model.named_parameters())
    for name, parameter in parallel.named_parameters():
        if name in layouts:
            grad = gather_shards(parameter.grad, layouts[name], group)
        else:  # as DDP does
            grad = parameter.grad.clone()
            dist.all_reduce(grad)
            grad /= world_size
        expected = unsplit[name].grad
        errors[name] = float((grad - expected).abs().max() / expected.abs().max())
    parallel.eval()
    with torch.no_grad():
        errors["evaluation"] = float((parallel(xs[rank]) - model.eval()(xs[rank])).abs().max())
    return errors, sorted(layouts), calls


class _RecordedCollectives:
    """Records the names of the collectives of activations, but not those that exchange the number of samples."""

    def __init__(self, calls: list[str]) -> None:
        names = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single")
        self.patches = [patch.object(dist, name, self._recording(name, calls)) for name in names]

    def _recording(self, name: str, calls: list[str]) -> Any:
        original = getattr(dist, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if not (name == "all_gather" and args[1].dtype == torch.int64):
                calls.append(name)
            return original(*args, **kwargs)

        return recording

    def __enter__(self) -> None:
        for patched in self.patches:
            patched.start()

    def __exit__(self, *_: object) -> None:
        for patched in self.patches:
            patched.stop()


def test_a_chain_of_layers_gives_the_gradient_of_the_mean_loss(pool: RankPool) -> None:
    for errors, names, calls in pool.run(errors_by_name, CHAIN):
        assert max(errors.values()) < 1e-9, errors
        assert names == [
            "classifier.0.bias",
            "classifier.0.weight",
            "classifier.3.weight",
            "classifier.6.bias",
            "classifier.6.weight",
        ]
        assert calls == ["all_gather", "reduce_scatter", "all_gather", "all_to_all_single"]


@pytest.mark.parametrize("kinds", [{"classifier.3": "column"}, {"classifier.3": "row"}])
def test_single_layers(pool: RankPool, kinds: dict[str, str]) -> None:
    for errors, names, _ in pool.run(errors_by_name, kinds):
        assert max(errors.values()) < 1e-9, errors
        assert "classifier.3.weight" in names


def run_with_dropout(rank: int, world_size: int) -> list[float]:
    _, parallel, _, _ = build(world_size, CHAIN, 0.5)
    torch.manual_seed(rank)
    x = batches(world_size)[rank]
    out = parallel(x)
    out.sum().backward()
    return [float((parallel(x) - parallel(x)).abs().max()), float(out.shape[0])]


def test_dropout_between_split_layers_differs_from_pass_to_pass(pool: RankPool) -> None:
    for rank, (difference, samples) in enumerate(pool.run(run_with_dropout)):
        assert difference > 0
        assert samples == rank + 1


class TiedTable(torch.nn.Module):
    """Looks up words in the weight of its head, which is split, and may use this weight otherwise, too."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.words.weight
        self.use = use

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.use(self.head(self.words(words).tanh()), self.head.weight)
        return out


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, weight: x,
    "sum": lambda x, weight: x * weight.sum(),
    "row": lambda x, weight: x + weight.flatten()[:7] * 2,
}


def errors_of_tied_table(rank: int, world_size: int, kind: str, use: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = TiedTable(USES[use]).double()
    split = Split(kind=kind, axis="replicate")  # type: ignore[arg-type]
    splits = {"head": split} if kind == "column" else {"head": split, "words": split}
    plan = Plan(axes=Axes(replicate=world_size), modules=Modules(splits=splits))
    words = [torch.randint(7, (r + 1, 3), generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    structure = find_structure(model, (words[1], torch.zeros(2)))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    parallel = copy.deepcopy(model)
    layouts = split_modules([parallel], plan, structure, mesh)
    count = sum(map(len, words))
    (model(torch.cat(words)).sin().sum() / count).backward()
    out = parallel(words[rank])
    errors = {"output": float((out - model(words[rank])).detach().abs().max())}
    (out.sin().sum() * world_size / count).backward()
    for name, parameter in parallel.named_parameters():
        expected = model.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        grad = gather_shards(parameter.grad, layouts[name], mesh.get_group("replicate"))
        errors[name] = float((grad - expected).abs().max())
    return errors


@pytest.mark.parametrize(
    ("kind", "use"), [("column", "none"), ("vocabulary", "none"), ("vocabulary", "sum"), ("vocabulary", "row")]
)
def test_a_table_that_is_tied_to_a_split_head_looks_up_the_samples_of_its_rank(
    pool: RankPool, kind: str, use: str
) -> None:
    for errors in pool.run(errors_of_tied_table, kind, use):
        assert max(errors.values()) < 1e-9, errors


def refusal_of_mixed_samples(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    group = AxisGroup(mesh.get_group("replicate"), rank, world_size, "replicate")
    spec = ShardSpec(DividedDimension(0, 1, 4, 1), group)
    x = torch.full((1, 4), float(rank))
    features = torch.nn.functional.linear(x, ShardView(torch.ones(4 // world_size, 4), spec, (4, 4)))
    try:
        features * x
    except InputError as error:
        return str(error)
    return ""


def test_features_of_all_samples_are_not_combined_with_the_sample_of_one_rank(pool: RankPool) -> None:
    """With one sample on each rank, their shapes fit together."""
    for message in pool.run(refusal_of_mixed_samples):
        assert "test_wide_layers.py" in message
        assert "another input has the samples of one rank only" in message

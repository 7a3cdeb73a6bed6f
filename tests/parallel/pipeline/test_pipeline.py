"""Under every schedule a pipeline gives the losses, gradients, buffers and weights of one process, also with skip
connections, tied weights, BatchNorm, short batches and accumulation; and it runs in the order that the simulator
assumes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.model_io.batch import ModelBatch, split_batch
from meshwright.parallel.attention_fastpath import without_attention_fastpath
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.pipeline.pipeline import PipelineExecutor
from meshwright.parallel.pipeline.stages import LocalStages, cut_stages, recompute_stages
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Memory, Pipeline
from meshwright.profile.structure.structure import Structure, find_structure
from meshwright.simulator.pipeline.order import pipeline_order
from tests.profile.models import small_model, token_batch
from tests.profile.structure.structured_models import (
    MultiTask,
    ResidualParent,
    TwoTowers,
    UNet,
    token_ids,
    transformers_model,
)
from tests.ranks import RankPool
from tests.soaked import all_but

TOLERANCE = 1e-9
CPU = torch.device("cpu")


# ---- models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        before = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)) @ (self.norm(x) * mask)
        out: Tensor = x + self.mix(before)
        return out


class Gpt(nn.Module):
    """Its own forward pass uses parameters (`places`, `scale`), passes an embedding of the mask to every block, and has
    a head that is tied to the embedding."""

    def __init__(self, layers: int = 4, tied: str = "module") -> None:
        super().__init__()
        self.tied = tied
        self.words = nn.Embedding(100, 8)
        self.places = nn.Parameter(torch.randn(12, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 100, bias=False)
        if tied == "module":
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        mask = (tokens != 0).unsqueeze(-1) * self.scale
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        scores = nn.functional.linear(x, self.words.weight) if self.tied == "forward" else self.head(x)
        return {"scores": scores, "last": x}


class Relay(nn.Module):
    """Returns one of its inputs unchanged, next to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), first


class Relays(nn.Module):
    """Has modules between its layers that return their input unchanged or as another view."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(8, 8)
        self.same = nn.Dropout(0.0)
        self.flat = nn.Flatten(0, 1)
        self.relays = nn.ModuleList(Relay() for _ in range(3))
        self.end = nn.Linear(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        first = self.flat(self.same(self.begin(rows)).unsqueeze(1))
        x = first
        for relay in self.relays:
            x, first = relay(x, first)
        out: Tensor = self.end(x + first)
        return out


class Counting(nn.Module):
    """Counts its forward passes in a buffer, and has BatchNorm layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)) for _ in range(4))
        self.activation = nn.Tanh()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.passes: Tensor

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        x = images
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.mean((2, 3))


def model_and_batch(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    builders: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "mlp": lambda: (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))), rows(8)),
        "tied": lambda: (Gpt(), token_batch(8, 6)),
        "tied in forward": lambda: (Gpt(tied="forward"), token_batch(8, 6)),
        "counting": lambda: (Counting(), (torch.randn(8, 2, 4, 4), torch.zeros(8))),
        "relays": lambda: (Relays(), rows(8)),
        "unet": lambda: (UNet(), (torch.randn(8, 1, 8, 8), torch.zeros(8))),
        "residual": lambda: (ResidualParent(4), (torch.randn(8, 8), torch.zeros(8))),
        "towers": lambda: (TwoTowers(head=True), (torch.arange(8), torch.arange(8), torch.zeros(8))),
        "tasks": lambda: (MultiTask(), (torch.randn(8, 6), torch.zeros(8))),
        "encoder": lambda: (Encoder(), (torch.randint(1, 50, (8, 6)), torch.arange(8) % 5 + 1, torch.zeros(8))),
    }
    if name in builders:
        model, batch = builders[name]()
    elif name == "resnet18":  # its last BatchNorm needs more than one pixel: a microbatch may have a single sample
        model, batch = small_model(name, batch=8)[0], (torch.randn(8, 3, 64, 64), torch.zeros(8))
    elif name[0].isupper():
        model, batch = transformers_model(name), {**token_ids(8), "target": torch.zeros(8)}
        model.config.use_cache = False  # type: ignore[union-attr]
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    else:
        model, batch, _ = small_model(name, batch=8)
    model = model.double()
    return model, tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def rows(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 8), torch.zeros(batch)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.arange(words.shape[1]) >= lengths.unsqueeze(1)
        x = self.body(self.words(words), src_key_padding_mask=hidden)
        out: Tensor = self.head(x.masked_fill(hidden.unsqueeze(-1), 0.0).sum(1))
        return out


def total(output: Any) -> Tensor:
    """A loss that depends on everything the model returns."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf.double() ** 2).sum() + leaf.double().sum() for leaf in leaves]).sum()


# ---- a run compared with one process


def even_cuts(model_structure: Structure, stages: int) -> tuple[str, ...]:
    usable = [cut.after for cut in model_structure.cuts if cut.crossing]
    names = [usable[(number + 1) * len(usable) // stages - (number + 1 == stages)] for number in range(stages - 1)]
    return tuple(names)


@contextmanager
def unchanged_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm takes no running statistics of samples that a microbatch borrows."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    yield
    for norm, buffers in zip(norms, kept, strict=True):
        norm.load_state_dict(buffers, strict=False)


def microbatches_of(batch: Any, sizes: list[int]) -> list[tuple[ModelBatch, int]]:
    """Microbatches of these sizes; one of size 0 borrows the first sample."""
    microbatches, begin = [], 0
    for size in sizes:
        first, end = (0, 1) if size == 0 else (begin, begin + size)
        piece = tree_map(lambda leaf, a=first, b=end: leaf[a:b].clone(), batch)
        microbatches.append((split_batch(piece), size))
        begin += size
    return microbatches


def plan_for(
    world: int, schedule: str, stages: int, microbatches: int, model_structure: Structure, **memory: Any
) -> Plan:
    options = {"schedule": schedule, "microbatches": microbatches, "cuts": even_cuts(model_structure, stages)}
    return Plan(
        axes=Axes(pipeline=world), pipeline=Pipeline.model_validate(options), memory=Memory.model_validate(memory)
    )


def build_pipeline(
    rank: int, world: int, model: nn.Module, batch: Any, plan: Plan, model_structure: Structure
) -> PipelineExecutor:
    mesh = build_mesh(plan, "cpu", world)
    assert mesh is not None
    local_stages = cut_stages(model, plan, model_structure, mesh.get_local_rank("pipeline"), batch)
    recompute_stages(local_stages, plan.memory.recompute)
    return PipelineExecutor(local_stages, plan, mesh, CPU)


def named_as_in_model(local_stages: LocalStages) -> Iterator[tuple[str, nn.Parameter]]:
    names = {tied.local_name: tied.name for tied in local_stages.tied}
    for name, parameter in local_stages.module.named_parameters():
        yield names.get(name, name), parameter


def error(actual: Tensor, expected: Tensor, scale: float) -> float:
    return (
        ((actual - expected).abs().max() / max(expected.abs().max().item(), scale)).item() if expected.numel() else 0.0
    )


def compare_with_one_process(
    rank: int, world: int, name: str, schedule: str, stages: int, steps: list[list[int]], options: dict[str, Any]
) -> dict[str, Any]:
    """Trains a step for each list of microbatch sizes, on the pipeline and in one process, and evaluates. Returns the
    largest errors, the names of the parameters on this rank and in the model, and the executed actions."""
    model, batch = model_and_batch(name)
    unsplit, _ = model_and_batch(name)
    model_structure = find_structure(model, batch)
    accumulation = options.get("accumulation", 1)
    plan = plan_for(world, schedule, stages, len(steps[0]) // accumulation, model_structure, **options)
    pipeline = build_pipeline(rank, world, model, batch, plan, model_structure)
    module = pipeline.local_stages.module
    optimizer, unsplit_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (module, unsplit))
    errors: dict[str, float] = {"loss": 0.0, "gradient": 0.0, "buffer": 0.0, "weight": 0.0, "output": 0.0}
    local_names: set[str] = set()
    has_last_stage = any(stage.is_last for stage in pipeline.local_stages.stages)
    for sizes in steps:
        parts = microbatches_of(batch, sizes)
        weights = [size / sum(sizes) for size in sizes]
        losses: dict[int, Tensor] = {}

        def loss_of(number: int, output: Any) -> Tensor:
            losses[number] = total(output) * weights[number]  # noqa: B023
            return losses[number]  # noqa: B023

        optimizer.zero_grad()
        unsplit_optimizer.zero_grad()
        pipeline.run(parts, loss_of)
        assert sorted(losses) == (list(range(len(sizes))) if has_last_stage else [])
        for number, (example, size) in enumerate(parts):
            with nullcontext() if size else unchanged_statistics(unsplit):
                loss = total(unsplit(*example.arguments, **example.keywords)) * weights[number]
                loss.backward()
            if has_last_stage:
                errors["loss"] = max(errors["loss"], error(losses[number].detach(), loss.detach(), 1e-9))
        right = {n: p.grad for n, p in unsplit.named_parameters()}
        largest = max(grad.abs().max().item() for grad in right.values() if grad is not None)
        for n, parameter in named_as_in_model(pipeline.local_stages):
            local_names.add(n)
            expected = right[n]
            assert (parameter.grad is None) == (expected is None), n
            if parameter.grad is not None and expected is not None:
                errors["gradient"] = max(errors["gradient"], error(parameter.grad, expected, 1e-6 * largest))
        optimizer.step()
        unsplit_optimizer.step()
    values = dict(unsplit.named_parameters())
    for n, parameter in named_as_in_model(pipeline.local_stages):
        errors["weight"] = max(errors["weight"], error(parameter.detach(), values[n].detach(), 1e-6))
    buffers = dict(unsplit.named_buffers())
    for n, buffer in module.named_buffers():
        errors["buffer"] = max(errors["buffer"], error(buffer.double(), buffers[n].double(), 1e-6))
    module.eval()
    unsplit.eval()
    with torch.no_grad(), without_attention_fastpath():
        for size in (3, 8):
            ((example, _),) = microbatches_of(batch, [size])
            output = pipeline.evaluate(example)
            assert (output is not None) == has_last_stage
            if has_last_stage:
                expected_output = unsplit(*example.arguments, **example.keywords)
                assert type(output) is type(expected_output)
                pairs = zip(tree_leaves(output), tree_leaves(expected_output), strict=True)
                errors["output"] = max(
                    errors["output"], *(error(a, b, 1e-9) for a, b in pairs if isinstance(a, Tensor))
                )
    return {"errors": errors, "local": local_names, "all": set(values), "executed": list(pipeline.executed)}


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(math.isfinite(value) and value <= TOLERANCE for value in result["errors"].values()), result["errors"]
    assert set().union(*(result["local"] for result in results)) == results[0]["all"]


OUR_MODELS = [
    "mlp",
    "tied",
    "tied in forward",
    "counting",
    "unet",
    "residual",
    "towers",
    "tasks",
    "encoder",
    "resnet18",
]
OUR_MODELS += ["llama", "gpt", "relays"]
TRANSFORMERS_MODELS = ["GPT2LMHeadModel", "LlamaForCausalLM"]


@pytest.mark.parametrize("name", all_but(["tied", "counting", "unet", "encoder"], [*OUR_MODELS, *TRANSFORMERS_MODELS]))
def test_a_model_in_two_stages_trains_as_in_one_process(two: RankPool, name: str) -> None:
    if name in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers")
    # microbatches of different sizes; then a short batch, in which one of them borrows its sample
    check(two.run(compare_with_one_process, name, "1f1b", 2, [[3, 3, 2], [2, 1, 0]], {}))


SCHEDULES = [
    ("gpipe", 1, 4),
    ("1f1b", 1, 5),
    ("interleaved_1f1b", 2, 4),
    ("zero_bubble", 1, 4),
    ("zero_bubble", 2, 4),
    ("zbv", 2, 5),
]


@pytest.mark.parametrize("name", all_but(["tied"], ["tied", "tied in forward", "counting", "residual"]))
@pytest.mark.parametrize(("schedule", "each", "microbatches"), SCHEDULES)
def test_every_schedule_trains_the_same_in_the_order_of_the_simulator(
    two: RankPool, schedule: str, each: int, microbatches: int, name: str
) -> None:
    sizes = [[2] * (8 - microbatches) + [1] * (2 * microbatches - 8)] * 2
    results = two.run(compare_with_one_process, name, schedule, 2 * each, sizes, {})
    check(results)
    assert tuple(tuple(map(tuple, result["executed"])) for result in results) == pipeline_order(
        schedule, 2, each, microbatches
    )


@pytest.mark.parametrize("name", all_but(["unet"], ["relays", "llama", "unet", "encoder"]))
def test_tensors_may_skip_stages(four: RankPool, name: str) -> None:
    check(four.run(compare_with_one_process, name, "1f1b", 4, [[2, 2, 2, 2]], {}))


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_four_ranks_train_as_one_process(four: RankPool, schedule: str, each: int) -> None:
    results = four.run(
        compare_with_one_process, "resnet18" if each == 2 else "tied", schedule, 4 * each, [[2, 2, 2, 2]], {}
    )
    check(results)
    assert tuple(tuple(map(tuple, result["executed"])) for result in results) == pipeline_order(schedule, 4, each, 4)


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("zero_bubble", 2)])
def test_accumulation_runs_several_rounds(two: RankPool, schedule: str, each: int) -> None:
    check(two.run(compare_with_one_process, "tied", schedule, 2 * each, [[2, 2, 2, 1]], {"accumulation": 2}))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2)])
def test_recomputed_blocks_train_the_same(two: RankPool, schedule: str, each: int, kind: str) -> None:
    results = two.run(compare_with_one_process, "counting", schedule, 2 * each, [[2, 2, 2, 2]], {"recompute": kind})
    check(results)

"""Compiled code under every axis: losses and gradients are those of the uncompiled plan, and compiled code really
runs."""

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.apply import apply
from meshwright.plan import Plan
from meshwright.proof.reference.reference_setup import default_dtype
from meshwright.train.drive.driver import Driver
from tests.parallel.compiler import compiled_graphs, compiling_with
from tests.parallel.zoo_sessions import zoo_session
from tests.proof.matrix_case import data_in_dtype
from tests.ranks import RankPool
from tests.zoo import BATCH, LENGTH, WORDS, Gpt

STEPS = 3  # the third batch is short
CUTS = {"cuts": ["blocks.1"], "microbatches": 2}


def train(rank: int, size: int, kind: str, groups: dict[str, Any], backend: str | None, steps: int) -> Any:
    """Returns the losses, the gradients, the number of compiled graphs, and the texts of warnings about compiling."""
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    with compiling_with(backend), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        session, setup = zoo_session(kind, Plan.model_validate(groups), rank, size)
        if backend is None:  # compiled code of the default backend draws other random numbers
            for dropout in (module for module in session.module.modules() if isinstance(module, nn.Dropout)):
                dropout.p = 0.0
        session.on_gradients = lambda: gradients.append(session.parallel.full_gradients())
        with default_dtype(setup.dtype):
            for batch in islice(session.batches(data_in_dtype(setup), 1, BATCH), steps):
                losses.append(float(session.step(batch)))
        texts = [str(warning.message) for warning in raised if "plan.compute.compile" in str(warning.message)]
        unexpected = [text for text in texts if "different shapes" not in text]  # the last batch is short
        return losses, gradients, compiled_graphs(), unexpected


def check_equal(
    pool: RankPool, kind: str, groups: dict[str, Any], what: str, backend: str | None, steps: int = STEPS
) -> list[int]:
    """Asserts that the compiled plan trains like the uncompiled one. Returns the number of graphs on each rank."""
    expected = pool.run(train, kind, groups, backend, steps)
    results = pool.run(train, kind, {**groups, "compute": {"compile": what}}, backend, steps)
    for (losses, gradients, _, texts), (plain_losses, plain_gradients, plain_graphs, _) in zip(
        results, expected, strict=True
    ):
        assert plain_graphs == 0
        assert texts == []
        assert len(losses) == steps
        assert losses == pytest.approx(plain_losses, rel=1e-9)
        for compiled, plain in zip(gradients, plain_gradients, strict=True):
            assert list(compiled) == list(plain)
            for name, gradient in plain.items():
                torch.testing.assert_close(compiled[name], gradient, rtol=1e-7, atol=1e-9, msg=name)
    return [graphs for _, _, graphs, _ in results]


def gradients_of_split_model(rank: int, size: int, what: str) -> tuple[dict[str, Tensor], int]:
    """Returns the gradients of a model with split layers, and the number of graphs that were compiled. Its dropout is
    the same compiled and uncompiled, because the backend calls torch's operators."""
    groups = {"axes": {"tensor": size}, "gradients": {"algorithm": "native"}, "compute": {"compile": what}}
    torch.manual_seed(0)
    model, tokens = Gpt(layers=2), torch.randint(0, WORDS, (2, LENGTH))
    with compiling_with("eager"):
        parallel = apply(Plan.model_validate(groups), model, torch.device("cpu"), size, (tokens, tokens))
        torch.manual_seed(1)
        Driver.of(parallel).forward(tokens).square().mean().backward()
        assert what == "none" or parallel.compilation.is_on
        return parallel.full_gradients(), compiled_graphs()


def test_the_pieces_between_the_collectives_of_split_blocks_are_compiled(two: RankPool) -> None:
    expected = two.run(gradients_of_split_model, "none")
    for (gradients, graphs), (plain, _) in zip(two.run(gradients_of_split_model, "blocks"), expected, strict=True):
        # One graph of the block as the compiler traces it, and one for each piece between its four collectives.
        assert graphs == 6
        assert list(gradients) == list(plain)
        for name, gradient in plain.items():
            torch.testing.assert_close(gradients[name], gradient, msg=name)


@pytest.mark.soak
def test_each_stage_of_a_pipeline_is_compiled_as_a_whole(two: RankPool) -> None:
    graphs = check_equal(two, "gpt", {"axes": {"pipeline": 2}, "pipeline": CUTS}, "model", "aot_eager", steps=1)
    assert graphs == [1, 2], "the last rank also compiles the loss"


@pytest.mark.soak
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("gpt", {"axes": {"replicate": 2}}),
        ("gpt", {"axes": {"shard": 2}}),
        ("gpt", {"axes": {"tensor": 2}, "modules": {"sequence": True}}),
        ("gpt", {"axes": {"tensor": 2}, "memory": {"recompute": "full"}}),
        ("bert", {"axes": {"tensor": 2}}),
        ("vgg", {"axes": {"tensor": 2}}),
        ("gpt", {"axes": {"pipeline": 2}, "pipeline": CUTS}),
        ("bert", {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["encoder.layers.1"], "microbatches": 2}}),
        ("gpt", {"axes": {"pipeline": 2}, "pipeline": {**CUTS, "schedule": "gpipe"}, "memory": {"recompute": "full"}}),
        (
            "gpt",
            {
                "axes": {"pipeline": 2},
                "pipeline": {
                    "cuts": ["blocks.0", "blocks.1", "blocks.2"],
                    "microbatches": 2,
                    "schedule": "zero_bubble",
                },
            },
        ),
        ("gpt", {"axes": {"replicate": 2}, "memory": {"recompute": "full"}}),
        ("gpt", {"axes": {"replicate": 2}, "memory": {"recompute": "selective"}}),
        ("resnet", {"axes": {"replicate": 2}, "memory": {"recompute": "full"}}),
        ("resnet", {"axes": {"replicate": 2}, "numerics": {"batch_norm": "synchronized"}}),
        ("resnet", {"axes": {"shard": 2}, "memory": {"recompute": "selective"}}),
    ],
)
def test_compiled_plans_of_two_ranks_train_like_uncompiled_ones(
    two: RankPool, kind: str, groups: dict[str, Any], what: str
) -> None:
    assert min(check_equal(two, kind, groups, what, "aot_eager")) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "groups",
    [
        {"axes": {"replicate": 2, "tensor": 2}},
        {"axes": {"shard": 2, "tensor": 2}},
        {"axes": {"pipeline": 2, "tensor": 2}, "pipeline": CUTS},
        {"axes": {"pipeline": 2, "replicate": 2}, "pipeline": CUTS},
        {"axes": {"pipeline": 2, "shard": 2}, "pipeline": CUTS},
        {"axes": {"replicate": 2, "shard": 2}},
    ],
)
def test_compiled_products_of_axes_train_like_uncompiled_ones(four: RankPool, groups: dict[str, Any]) -> None:
    assert min(check_equal(four, "gpt", groups, "model", "aot_eager")) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "groups",
    [
        {"axes": {"replicate": 2}},
        {"axes": {"shard": 2}},
        {"axes": {"tensor": 2}},
        {"axes": {"pipeline": 2}, "pipeline": CUTS},
    ],
)
def test_code_of_the_default_backend_trains_like_uncompiled_code(two: RankPool, groups: dict[str, Any]) -> None:
    assert min(check_equal(two, "gpt", groups, "model", None)) > 0

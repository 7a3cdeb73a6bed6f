"""Plans that compute the loss in chunks train the same model as others, and never have all scores in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import InputError
from meshwright.parallel.chunked_loss.scores import LazyScores
from meshwright.plan import Plan
from tests.parallel.chunked_loss.chunked_models import (
    LENGTH,
    SAMPLES,
    WORDS,
    batch,
    make_session,
    plan_of,
    train,
)
from tests.ranks import RankPool
from tests.soaked import all_but


def assert_trains_the_same(results: list[Any], expected: Any, loss: str) -> None:
    # Models of transformers compute their loss in fp32, whatever the dtype of their weights is.
    relative, absolute = (1e-6, 1e-6) if loss == "model" else (1e-9, 1e-10)
    for losses, state in results:
        assert losses == pytest.approx(expected[0], rel=relative)
        for name, value in expected[1].items():
            torch.testing.assert_close(state[name], value, rtol=relative, atol=absolute, msg=name)


class LargestResult(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor with a dimension of the vocabulary's size that an operator
    returns. Lazy scores have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and not isinstance(leaf, LazyScores)
                and not leaf.is_meta
                and WORDS in leaf.shape
            ):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("plain", "mean"),
        ("bias", "counted"),
        ("tied", "smoothed"),
        ("frozen", "mean"),
        ("plain", "scores too"),
        ("gpt2", "model"),
        ("llama", "model"),
    ],
)
def test_one_rank_trains_the_same(model: str, loss: str) -> None:
    expected = train(0, 1, model, loss, Plan())
    assert_trains_the_same([train(0, 1, model, loss, plan_of(3))], expected, loss)


@pytest.mark.parametrize(
    ("model", "loss", "largest"),
    # The largest other tensors are weights and their gradients.
    [("tied", "mean", WORDS * 16), ("plain", "smoothed", WORDS * 16), ("gpt2", "model", WORDS * 32)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_scores_are_never_in_memory(model: str, loss: str, largest: int, precision: str) -> None:
    scores = SAMPLES * LENGTH * WORDS

    def largest_result(chunks: int) -> int:
        plan = plan_of(chunks, numerics={"precision": precision})
        session = make_session(model, loss, plan, dtype=torch.float32)
        with LargestResult() as result:
            session.step(batch(0, loss))
        return result.elements

    assert largest_result(1) == scores
    assert largest_result(12) <= largest < scores


def test_a_batch_without_valid_targets_has_loss_0_and_no_gradient() -> None:
    session = make_session("plain", "mean", plan_of(3))
    tokens, target = batch(0)
    before = {name: tensor.clone() for name, tensor in session.state_dict().items()}
    assert float(session.step((tokens, torch.full_like(target, -100)))) == 0
    torch.testing.assert_close(session.state_dict(), before, rtol=0, atol=0)
    scores = session.model(tokens)
    F.cross_entropy(scores.view(-1, WORDS), torch.full((tokens.numel(),), -100)).backward()
    assert all((weight.grad == 0).all() for weight in session.module.parameters() if weight.grad is not None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_train_almost_the_same(precision: str) -> None:
    results = []
    for chunks in (1, 4):
        session = make_session("bias", "mean", plan_of(chunks, numerics={"precision": precision}), dtype=torch.float32)
        results.append([float(session.step(batch(step))) for step in range(4)])
    assert results[0] == pytest.approx(results[1], rel=2e-3)


DIVIDED: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "accumulate": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}},
    "shard, accumulate": {"axes": {"shard": 2}, "memory": {"accumulation": 2, "recompute": "full"}},
    "shard optimizer": {"axes": {"shard": 2}, "memory": {"sharding": "optimizer"}},
}


@pytest.mark.parametrize(
    ("model", "loss", "divided"),
    all_but(
        [
            ("tied", "mean", "accumulate"),
            ("tied", "counted", "shard"),
            ("plain", "scores too", "shard"),
        ],
        [
            (model, loss, divided)
            for model, loss in (
                ("tied", "mean"),
                ("tied", "counted"),
                ("plain", "scores too"),
                ("frozen", "smoothed"),
                ("gpt2", "model"),
            )
            for divided in DIVIDED
            if loss != "scores too" or "accumulate" not in divided  # a sum of means over different numbers
        ],
    ),
)
def test_two_ranks_train_as_one_with_ignored_targets(two: RankPool, model: str, loss: str, divided: str) -> None:
    expected = train(0, 1, model, loss, Plan())
    assert_trains_the_same(two.run(train, model, loss, plan_of(3, **DIVIDED[divided])), expected, loss)


@pytest.mark.parametrize("loss", all_but(["mean"], ["mean", "model"]))
@pytest.mark.parametrize("compiled", all_but(["model"], ["blocks", "model"]))
def test_compiled_models_train_the_same(monkeypatch: pytest.MonkeyPatch, compiled: str, loss: str) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    compile_function = torch.compile
    model = "tied" if loss == "mean" else "gpt2"
    expected = train(0, 1, model, loss, Plan())
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, backend=count))
    torch._dynamo.reset()
    assert_trains_the_same([train(0, 1, model, loss, plan_of(3, compute={"compile": compiled}))], expected, loss)
    assert graphs
    assert not any("cross_entropy" in str(graph.code) or "log_softmax" in str(graph.code) for graph in graphs)


def test_evaluations_and_loops_get_scores() -> None:
    session = make_session("tied", "mean", plan_of(3))
    tokens, target = batch(0)
    with torch.no_grad():
        assert type(session.model(tokens)) is Tensor
    dataset = list(zip(tokens, target, strict=True))
    metrics = {"largest": lambda scores, target: (scores.amax((1, 2)).sum(), len(target))}
    values = session.evaluate(dataset, metrics)
    whole = make_session("tied", "mean", Plan()).evaluate(dataset, metrics)
    assert values is not None
    assert values == pytest.approx(whole)
    # A loop of the user's own: other functions of the output compute the scores.
    output = session.model(tokens)
    assert isinstance(output, LazyScores)
    assert output.argmax(-1).shape == target.shape


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"axes": {"tensor": 2}}, "does not work with layers that are split or placed on ranks"),
        ({"axes": {"pipeline": 2}}, "does not work with a pipeline"),
        ({"numerics": {"precision": "fp8"}}, "does not work with numerics.precision fp8"),
    ],
)
def test_other_choices_that_it_does_not_work_with_are_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"loss_chunks is 4, which {message}.*set compute.loss_chunks to 1"):
        make_session("plain", "mean", plan_of(4, **groups))

"""Lazy scores are those of the head for every function, and a cross entropy of them is computed in chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel.chunked_loss.scores import LazyScores, lazy_scores

SAMPLES, LENGTH, WIDTH, CLASSES = 3, 7, 8, 50
GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=GENERATOR)
TARGET[0, :3] = -100
VALID = TARGET != -100
WEIGHT = torch.rand(CLASSES, generator=GENERATOR).double()
Function = Callable[..., Tensor]


class Square(torch.autograd.Function):
    """A function that torch calls without `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def results(function: Function, lazy: bool, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns the value of a function of scores, and the gradients of hidden states and head."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((SAMPLES, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, added = (torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)
    head = (hidden, weight, added if bias else None)
    value = function(lazy_scores(*head, 4) if lazy else F.linear(*head))
    if value.dim():  # another gradient for each token
        value = (value * torch.arange(value.numel()).reshape(value.shape)).sum()
    value.backward()
    return [value.detach(), *(tensor.grad for tensor in head if tensor is not None and tensor.grad is not None)]


def assert_same(function: Function, **options: Any) -> None:
    ours, expected = results(function, True, **options), results(function, False, **options)
    assert len(ours) == len(expected)
    for value, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, other)


FORMS: dict[str, Function] = {
    "view": lambda s, **k: F.cross_entropy(s.double().view(-1, CLASSES), TARGET.view(-1), **k),
    "transpose": lambda s, **k: F.cross_entropy(s.transpose(1, 2), TARGET, **k),
    "permute": lambda s, **k: F.cross_entropy(s.to(torch.float64).permute(0, 2, 1), TARGET, **k),
    "shift": lambda s, **k: F.cross_entropy(
        s[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[:, 1:].flatten(), **k
    ),
    "narrow": lambda s, **k: F.cross_entropy(s.narrow(1, 2, 4).reshape(-1, CLASSES), TARGET[:, 2:6].flatten(), **k),
    "mask": lambda s, **k: F.cross_entropy(s[VALID], TARGET[VALID], **k),
    "one sample": lambda s, **k: F.cross_entropy(s[1].clone(), TARGET[1], **k),
    "module": lambda s, **k: nn.CrossEntropyLoss(**k)(s.flatten(0, 1), TARGET.flatten()),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "label_smoothing": 0.2, "reduction": "sum"},
    {"reduction": "none"},
    {"reduction": "none", "weight": WEIGHT, "label_smoothing": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_cross_entropy_and_its_gradients_are_those_of_whole_scores(form: str, options: dict[str, Any]) -> None:
    computed: list[bool] = []

    def loss(scores: Tensor) -> Tensor:
        value = FORMS[form](scores, **options)
        computed.append(isinstance(scores, LazyScores) and scores.head.are_computed)
        return value

    assert_same(loss)
    assert_same(loss, bias=False)
    assert not any(computed)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s.logsumexp(-1).square().mean() + F.cross_entropy(s.flatten(0, 1), TARGET.flatten()),
        lambda s: F.cross_entropy(s.flatten(0, 1), TARGET.flatten()) + s.logsumexp(-1).square().mean(),
        lambda s: F.nll_loss(s.log_softmax(-1).flatten(0, 1), TARGET.flatten()),
        lambda s: F.cross_entropy(s.flatten(0, 1), s.detach().flatten(0, 1).softmax(-1)),
        lambda s: torch.stack([s, 2 * s]).square().sum(),
        lambda s: s[..., :10].sum() + s.view(-1).square().sum() + s.mT.sum((0, 1))[0],
        lambda s: s.masked_fill(VALID.unsqueeze(-1), 0.0).sum(),
        lambda s: Square.apply(s),
        lambda s: Square.apply(s.transpose(1, 2)[1:]),
        lambda s: F.cross_entropy(s.flatten(0, 1), TARGET.flatten(), size_average=False),
    ],
)
def test_every_other_function_gets_the_scores(function: Function) -> None:
    assert_same(function)


def test_scores_that_are_changed_in_place_stay_changed() -> None:
    def change(scores: Tensor) -> Tensor:
        flat = scores.view(-1, CLASSES)
        flat[0] = 0.0
        scores[1].mul_(2)
        assert bool((scores[0, 0] == 0).all())
        return F.cross_entropy(flat, TARGET.flatten()) + F.cross_entropy(scores.transpose(1, 2), TARGET)

    assert_same(change)


def test_scores_that_are_first_used_without_gradients_have_gradients_later() -> None:
    def loss(scores: Tensor) -> Tensor:
        with torch.no_grad():
            right = (scores.argmax(-1) == TARGET).sum()
        return F.cross_entropy(scores.flatten(0, 1), TARGET.flatten()) * (1 + right)

    assert_same(loss)


def test_hooks_get_the_gradient_of_the_scores() -> None:
    def loss(scores: Tensor) -> Tensor:
        scores.register_hook(lambda gradient: gradient * 3)
        return F.cross_entropy(scores.flatten(0, 1), TARGET.flatten())

    assert_same(loss)


def test_a_graph_that_is_kept_is_differentiated_twice_and_another_one_once() -> None:
    hidden, weight = torch.randn(4, WIDTH).requires_grad_(), torch.randn(CLASSES, WIDTH).requires_grad_()
    loss = F.cross_entropy(lazy_scores(hidden, weight, None, 2), TARGET[1, :4])
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_shape_dtype_and_text_do_not_compute_the_scores() -> None:
    hidden, weight = torch.randn(2, 5, WIDTH).requires_grad_(), torch.randn(CLASSES, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = lazy_scores(hidden, weight, None, 3)
    assert isinstance(scores, LazyScores)
    assert (scores.shape, scores.dtype, scores.device, scores.requires_grad, len(scores), scores.dim()) == (
        (2, 5, CLASSES),
        torch.bfloat16,
        hidden.device,
        True,
        2,
        3,
    )
    assert str(scores) == "LazyScores((2, 5, 50), dtype=torch.bfloat16, chunks=3)"
    assert scores.float().dtype == torch.float32
    assert not scores.head.are_computed
    assert scores.half().dtype == torch.float16
    assert scores.head.are_computed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_in_the_dtype_of_autocast_and_the_loss_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(size, WIDTH, generator=generator).requires_grad_() for size in (64, CLASSES))
    target = torch.randint(0, CLASSES, (64,), generator=generator)
    gradients: list[tuple[Tensor, ...]] = []
    for lazy in (True, False):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", dtype=dtype):
            scores = lazy_scores(hidden, weight, None, 4) if lazy else F.linear(hidden, weight)
            inside = F.cross_entropy(scores, target)
        loss = F.cross_entropy(scores.float(), target)
        assert loss.dtype == inside.dtype == torch.float32
        torch.testing.assert_close(loss, inside)
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        gradients.append((loss.detach(), hidden.grad, weight.grad))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-3)

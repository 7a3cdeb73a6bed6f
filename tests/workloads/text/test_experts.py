"""The decoder's mixtures of experts: equal to a loop over tokens, and a capacity that no other sample changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.workloads.text.decoder import Decoder
from meshwright.workloads.text.experts import Mixture

HIDDEN, EXPERTS, CHOICES = 16, 4, 2


def mixture(activation: str = "swiglu", capacity: float | None = None, dtype: torch.dtype = torch.float64) -> Mixture:
    torch.manual_seed(0)
    return Mixture(HIDDEN, 24, EXPERTS, CHOICES, activation, capacity).to(dtype)


def one_by_one(mix: Mixture, x: Tensor, limit: int | None = None) -> Tensor:
    """The same, token by token."""
    out, experts = torch.zeros_like(x), mix.experts
    for sample in range(x.shape[0]):
        used = [0] * EXPERTS
        for position, token in enumerate(x[sample]):
            weights, chosen = mix.router(token).softmax(-1).topk(CHOICES)
            for weight, number in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                used[number] += 1
                if limit is not None and used[number] > limit:
                    continue
                up = experts.up[number] @ token
                gate = experts.gate
                inner = F.gelu(up, approximate="tanh")
                if isinstance(gate, Tensor):
                    inner = F.silu(gate[number] @ token) * up
                out[sample, position] += weight * (experts.down[number] @ inner)
    return out


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(activation: str, capacity: float | None) -> None:
    mix, x = mixture(activation, capacity), torch.randn(3, 8, HIDDEN, dtype=torch.float64)
    limit = None if capacity is None else 2  # half of the even share of 8 tokens · 2 choices / 4 experts
    torch.testing.assert_close(mix(x), one_by_one(mix, x, limit), rtol=1e-12, atol=1e-14)
    alone = torch.cat([mix(sample[None]) for sample in x])
    torch.testing.assert_close(mix(x), alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_the_grouped_product_in_fp32_is_the_loop_in_fp64(capacity: float | None) -> None:
    """Grouped products of torch leave the rows of dropped choices undefined, in the backward pass, too."""
    exact, mix = mixture(capacity=capacity), mixture(capacity=capacity, dtype=torch.float32)
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    rounded = x.detach().float().requires_grad_()
    torch.testing.assert_close(mix(rounded).double(), exact(x), rtol=1e-4, atol=1e-6)
    torch.use_deterministic_algorithms(True)  # fills memory that nothing was written to with NaN
    try:
        mix(rounded).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    exact(x).square().sum().backward()
    for name, tensor in {"x": x, **dict(exact.named_parameters())}.items():
        in_fp32 = rounded if name == "x" else mix.get_parameter(name)
        assert tensor.grad is not None
        assert in_fp32.grad is not None
        torch.testing.assert_close(
            in_fp32.grad.double(), tensor.grad, rtol=1e-3, atol=1e-5 * tensor.grad.abs().max().item()
        )


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"number": 4, "topk": 2}, "experts have no 'topk': did you mean 'top_k'"),
        ({"number": 2, "top_k": 3}, "number 2 and top_k 3: write a number of at least 2"),
        ({"number": 4, "capacity": 0}, "capacity 0: write a positive number"),
        ({"number": "4"}, r"experts\.number is '4': write a whole number"),
    ],
)
def test_wrong_experts_are_refused_with_names_and_values(experts: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Decoder(1, HIDDEN, 2, 8, 32, experts=experts)

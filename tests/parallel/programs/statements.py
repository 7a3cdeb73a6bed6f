"""Small models whose forward pass does something unusual along the dimension that ranks divide, between two attention
layers. Each function of `STATEMENTS` is such a statement: it gets activations (batch, length, width), the tokens, and
the model. `REFUSED` are those that plans with a divided sequence refuse, and a part of the message."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 8, 8
STATEMENTS: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {}


def statement(function: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> Callable[[Tensor, Tensor, nn.Module], Tensor]:
    STATEMENTS[function.__name__] = function
    return function


class Mix(Function):
    """Mixes positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x.flip(1) / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + grads[0].flip(1) / 2


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return grads[0] * (sigmoid + x * sigmoid * (1 - sigmoid))


class ClippedGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].clamp(-1e-3, 1e-3)


class AddInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(x.flip(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + grads[0].flip(1)


swish_apply = Swish.apply  # kept before a plan is applied, as many scripts do


@statement
def write_position(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, 0] * 2
    return x


@statement
def clamp_without_gradient(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x * 1.0
    with torch.no_grad():
        x[:, 4:6].clamp_(-0.1, 0.1)
    return x


@statement
def write_through_another_view(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    base = x * 1.0
    first = base[:, :3]
    base[:, 1].fill_(0.5)
    return x + first.mean(1, keepdim=True)


@statement
def add_to_slice(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, 3:7] += 1.5
    return x


@statement
def write_where_token(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[tokens == 3] = 0.5
    return x


@statement
def copy_then_write(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    z = torch.zeros_like(x)
    z.copy_(x)
    z[:, 5] = 0
    return z


@statement
def write_slice_by_variable(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x[:, 2:5]
    y.mul_(3.0)
    return x


@statement
def write_position_by_variable(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x[:, 2]
    y.mul_(3.0)
    return x


@statement
def read_position_after_write(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x[:, 2]
    x += 1
    return x + y.unsqueeze(1)


@statement
def read_slice_after_write(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x[:, 2:4]
    x *= 2
    return x + y.sum(1, keepdim=True)


@statement
def write_through_transpose(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x.transpose(0, 1)
    y[0] = 1.0
    return x


@statement
def write_copy_of_transpose(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x.transpose(1, 2).reshape(len(x), -1)
    y.mul_(2)
    return x + y.mean()


@statement
def write_through_reshape(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    y = x.reshape(len(x), -1)
    y.mul_(2)
    return x


@statement
def write_flat(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x.view(-1)[:5] = 2.0
    return x


@statement
def write_every_other(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, ::2].fill_(1.0)
    return x


@statement
def swap_positions(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, [0, 1]] = x[:, [1, 0]]
    return x


@statement
def shift_in_place(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, 1:] = x[:, :-1].clone()
    return x


@statement
def write_last(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, -1] *= 2
    return x


@statement
def write_features(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[..., 0] = 0
    return x


@statement
def write_reversed(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:] = x.flip(1)
    return x


@statement
def write_through_data(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x.data[:, 0] = 0.0
    return x


@statement
def write_through_detached(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x.detach()[:, 1].fill_(0.0)
    return x


@statement
def write_list(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    torch._foreach_mul_([x], 2.0)
    return x


@statement
def scatter(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    index = torch.tensor([1, 4])[None, :, None].expand(len(x), 2, WIDTH)
    return x.scatter_(1, index, 0.3)


@statement
def index_add(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x.index_add_(1, torch.tensor([0, 3]), torch.ones(len(x), 2, WIDTH, dtype=x.dtype))
    return x


@statement
def index_fill(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x.clone().index_fill_(1, torch.tensor([0, 3]), 0.2)


@statement
def write_shards_into_zeros(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    z = torch.zeros(x.shape, dtype=x.dtype)
    z[:, :] = x
    z[:, 2] = x[:, 3]
    return z


@statement
def custom_function(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return Mix.apply(x)


@statement
def custom_activation(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return swish_apply(x)


@statement
def custom_function_in_place(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return AddInPlace.apply(x.clone())


@statement
def linear_hook(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: g - g.mean(1, keepdim=True))
    return x


@statement
def scaling_hook(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: g * torch.linspace(0, 1, LENGTH, dtype=g.dtype)[:, None])
    return x


@statement
def normalizing_hook(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: g / (1 + g.norm()))
    return x


@statement
def custom_gradient(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return ClippedGradient.apply(x)


def _halve_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 0.5,)


@statement
def module_hook(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    norm = model.get_submodule("blocks.1.norms.0")
    if not norm._backward_hooks:
        norm.register_full_backward_hook(_halve_gradient)
    return x


@statement
def max_pool(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x + F.max_pool1d(x, 3, 1, 1)


@statement
def gradient_of_function(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x + torch.func.grad(lambda z: (z**3).sum())(x) * 0.5


@statement
def captured_by_vmap(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x + torch.func.vmap(lambda a: (x * a).mean())(torch.ones(3, dtype=x.dtype)).sum()


@statement
def checkpoint_of_mixing(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return checkpoint(lambda a: a + a.flip(1), x, use_reentrant=False)


@statement
def reentrant_checkpoint(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return checkpoint(lambda a: a + a.flip(1), x, use_reentrant=True)


@statement
def vmap(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return torch.func.vmap(lambda a: a - a.mean(0))(x)


@statement
def requires_grad(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x.requires_grad_() * 1.0 if x.requires_grad else x


@statement
def cumulative_sum(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    return x.cumsum(1)


@statement
def select_by_largest(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    best = x.sum(-1).argmax(1)
    return x + x[torch.arange(len(x)), best][:, None]


@statement
def inner_gradient(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    if not x.requires_grad:
        return x
    (g,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return x + g.flip(1) * 0.1


@statement
def set_data(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x.data = x.data * 2
    return x


REFUSED = {"inner_gradient": "computes gradients", "set_data": "sets an attribute", "captured_by_vmap": "transforms"}
if not isinstance(Function.__dict__["apply"], classmethod):  # torch 2.15 runs a kept `apply` in C
    REFUSED["custom_activation"] = "that was kept before the model was divided"

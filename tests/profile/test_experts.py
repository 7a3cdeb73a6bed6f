"""Mixtures of experts are found in unedited models, and traced with rows that are routed evenly."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.profile.experts import find_expert_layers
from meshwright.profile.structure.structure import find_structure
from meshwright.profile.tracing.real_steps import trace_or_measure_profile
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.experts import routed_bytes

WIDTH, EXPERTS, CHOICES, LENGTH = 8, 4, 2, 6


class Loop(nn.Module):
    """Calls every expert with the rows of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).topk(CHOICES)
        return self.mix(rows, weights, chosen).view_as(x)

    def mix(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            positions, choice = torch.where(chosen == number)
            if len(positions):
                mixed.index_add_(0, positions, expert(rows[positions]) * weights[positions, choice, None])
        return mixed


class LoopOverUsed(Loop):
    """Loops over the numbers of the experts that are used, as Mixtral of transformers 4 does."""

    def mix(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(rows)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            choice, positions = torch.where(mask[number].squeeze(0))
            output = self.experts[number](rows[None, positions].reshape(-1, WIDTH))
            mixed.index_add_(0, positions, output * weights[positions, choice, None])
        return mixed


class Masks(Loop):
    """Selects rows by masks of truth values."""

    def mix(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            positions = mask.nonzero(as_tuple=True)[0]
            mixed = mixed.index_add(0, positions, expert(rows[positions]))
        return mixed


@pytest.mark.parametrize("kind", [Loop, LoopOverUsed, Masks])
def test_rows_of_experts_are_counted_as_even_routing_gives_them(kind: type[nn.Module]) -> None:
    model, batch = kind(), (torch.randn(3, LENGTH, WIDTH), torch.zeros(3))
    (layer,) = find_expert_layers(model)
    assert (layer.kind, layer.experts, layer.weights[1]) == ("list", EXPERTS, "experts.1")
    profile, note = trace_or_measure_profile(model, batch, lambda output, _: output.square().mean(), on_gpu=False)
    rows_per_sample = LENGTH * CHOICES
    products = [
        o for s in profile.segments for o in s.operators if o.layer.startswith("experts.") and o.kind == "matmul"
    ]
    forward = [o for o in products if not o.computes_gradient]
    assert sum(o.flops.at(10) for o in forward) == 10 * rows_per_sample * 2 * WIDTH * WIDTH
    assert note == "traced steps at batches 2, 3 and 5, with rows routed evenly to the 4 experts of 1 layers"
    real = model(batch[0])  # the model itself routes as before
    assert real.shape == batch[0].shape


class StackedLoop(nn.Module):
    """Stacked weights of its own, computed one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(rows)
        for number in range(self.num_experts):
            positions, choice = torch.where(chosen == number)
            if positions.numel() == 0:
                continue
            output = F.silu(rows[positions] @ self.up[number]) @ self.down[number]
            mixed.index_add_(0, positions, output * weights[positions, choice, None])
        return mixed


class WithStackedLoop(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.experts = StackedLoop()  # type: ignore[assignment]

    def mix(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mixed: Tensor = self.experts(rows, chosen, weights)
        return mixed


def test_stacked_experts_with_a_loop_of_their_own_are_traced_and_all_their_rows_exchanged() -> None:
    model, batch = WithStackedLoop(), (torch.randn(3, LENGTH, WIDTH), torch.zeros(3))
    profile = trace_profile(model, batch, lambda output, _: output.square().mean(), on_gpu=False)
    rows_per_sample = LENGTH * CHOICES
    products = [o for s in profile.segments for o in s.operators if o.layer == "experts" and o.kind == "matmul"]
    forward = [o for o in products if not o.computes_gradient]
    assert sum(o.flops.at(10) for o in forward) == 2 * 10 * rows_per_sample * 2 * WIDTH * WIDTH
    ((rows, weights, count),) = routed_bytes(profile, 10)
    assert (rows, weights, count) == (10 * rows_per_sample * WIDTH * 4, 10 * rows_per_sample * 4, 1)


def test_a_model_with_a_list_of_experts_is_not_cut() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Loop(), nn.Linear(WIDTH, WIDTH))
    structure = find_structure(model, torch.zeros(2, LENGTH, WIDTH))
    assert structure.cuts == ()
    assert structure.no_cut_reason == "the values of tensors decide which modules of its list of experts 1 calls"


def test_layers_of_a_model_are_no_experts() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert find_expert_layers(Layers()) == ()
    assert trace_profile(Layers(), (torch.zeros(2, WIDTH), torch.zeros(2)), lambda y, _: y.mean()).flops(4) > 0

"""Models whose shapes depend on their data are measured in real steps, exactly as they ran, and left as they were."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.blocks.recompute import Recompute
from meshwright.call import load
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.tracing.real_steps import measured_profile, profile_or_measure
from meshwright.profile.tracing.trace import profile
from meshwright.simulator.memory.peak import CUDA_MEMORY, predict_memory
from tests.profile.models import images, make

Loss = Callable[[Any, Any], Tensor]


class Masked(nn.Module):
    """Computes on the samples that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        out: Tensor = self.second(x[x.sum(-1) > 0]).relu()
        return out


class Looping(nn.Module):
    """Runs a layer as often as its values say, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().max().item())):
            x = self.dropout(self.layer(x))
        return x


class Routed(nn.Module):
    """Sends each sample to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


def total(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def prepared(kind: type[nn.Module], batch: int = 8) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return kind(), (torch.randn(batch, 8), torch.zeros(batch))


KINDS = (Masked, Looping, Routed)


def flops_in(model: nn.Module, batch: Any, loss: Loss) -> int:
    with FlopCounterMode(display=False) as counter:
        loss(model(*batch[:-1]), batch[-1]).backward()
    return counter.get_total_flops()


def saved_in(model: nn.Module, batch: Any, loss: Loss) -> int:
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    known |= {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(batch)}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no memory is given out twice

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss(model(*batch[:-1]), batch[-1])
    return sum(saved.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_what_it_cost(kind: type[nn.Module]) -> None:
    model, batch = prepared(kind)
    with pytest.raises(InputError, match="cannot be traced"):
        profile(model, batch, total)
    chance = torch.get_rng_state()
    found, based_on = profile_or_measure(model, batch, total, on_gpu=False)
    assert based_on == "measured steps at batches 4 and 8"
    assert found.traced_batches == (4, 8)
    torch.set_rng_state(chance)
    assert found.saved_bytes(8) == saved_in(model, batch, total) > 0
    torch.set_rng_state(chance)
    assert found.flops(8) == flops_in(model, batch, total) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_and_chance_are_left_as_they_were(kind: type[nn.Module]) -> None:
    model, batch = prepared(kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = batch[0].clone()
    chance = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    measured_profile(model, batch, total)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(batch[0], inputs)
    assert torch.equal(torch.get_rng_state(), chance[0])
    assert random.getstate() == chance[1]
    assert (numpy.random.get_state()[1] == chance[2]).all()  # type: ignore[index]


@pytest.mark.parametrize("name", ["mnist", "resnet18", "gpt", "llama", "encoder"])
def test_where_a_model_can_be_traced_both_say_the_same(name: str) -> None:
    model, batch, loss = make(name, batch=6)
    traced = profile(model, batch, loss, on_gpu=False, repeats=False)
    measured = measured_profile(model, batch, loss, on_gpu=False)
    assert measured.parameters == traced.parameters
    adamw = optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), at_once=True)
    for size in (3, 6, 60):
        assert measured.flops(size) == pytest.approx(traced.flops(size))
        assert measured.saved_bytes(size) == pytest.approx(traced.saved_bytes(size))
        both = [predict_memory(found, Plan(), size, adamw, CUDA_MEMORY) for found in (measured, traced)]
        assert sum(both[0].breakdown.values()) == pytest.approx(sum(both[1].breakdown.values()), rel=1e-3)


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_blocks_that_are_computed_again_are_measured_so(kind: Recompute) -> None:
    model, batch, loss = make("gpt", batch=4)
    traced = profile(model, batch, loss, on_gpu=False, repeats=False, recompute=kind)
    measured = measured_profile(model, batch, loss, on_gpu=False, recompute=kind)
    assert measured.recompute == kind
    assert measured.saved_bytes(4) == traced.saved_bytes(4)
    assert measured.flops(4) == traced.flops(4)


def test_gradients_do_not_grow_and_activations_do() -> None:
    model, batch = prepared(Masked)
    found = measured_profile(model, batch, total)
    gradients = [c.bytes for s in found.stretches for c in s.changes if c.role == "gradient"]
    assert sum(g.at(800) for g in gradients) == sum(p.numel() * 4 for p in model.parameters())
    first = [o for s in found.stretches for o in s.operators if o.layer == "first" and o.kind == "matmul"]
    assert first[0].flops.at(80) == 80 * 2 * 8 * 16


def test_one_sample_is_measured_as_it_is() -> None:
    model, batch = prepared(Looping, batch=1)
    found, based_on = profile_or_measure(model, batch, total, on_gpu=False)
    assert (found.traced_batches, based_on) == ((1,), "measured steps at batch 1")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_half_precision_is_kept(on_gpu: bool) -> None:
    model, batch, loss = make("llama", batch=4)
    traced = profile(model, batch, loss, precision="bf16", on_gpu=False, repeats=False)
    found = measured_profile(model, batch, loss, precision="bf16", on_gpu=on_gpu)
    if on_gpu:
        assert found.saved_bytes(4) >= traced.saved_bytes(4)
    else:
        assert found.saved_bytes(4) == traced.saved_bytes(4)


def test_what_can_be_traced_is_not_run() -> None:
    model, batch, loss = make("mnist")
    model.register_forward_hook(lambda *_: pytest.fail("it ran") if not _fake(_[2]) else None)
    assert profile_or_measure(model, batch, loss)[1] == "traced steps at batches 2, 3 and 5"


def _fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("on_meta", ["model", "sample"])
def test_a_model_without_values_is_refused_with_what_could_not_be_traced(on_meta: str) -> None:
    model, batch = prepared(Masked)
    if on_meta == "model":
        model = model.to("meta")
    else:
        batch = tuple(tensor.to("meta") for tensor in batch)
    with pytest.raises(InputError, match=r"cannot be traced in its forward pass \(Masked\): .* no real step can be"):
        profile_or_measure(model, batch, total)
    with pytest.raises(InputError, match="lies on no device, so no real step can be measured"):
        measured_profile(model, batch, total)


def test_a_step_that_fails_says_where() -> None:
    with pytest.raises(
        InputError, match=r"a real step of the model fails: RuntimeError: .* \(.*, line \d+\)"
    ) as caught:
        measured_profile(Masked(), (torch.zeros(4, 9), torch.zeros(4)), total)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"cannot be traced in \w+ \(Linear\)"):
        profile_or_measure(Masked(), (torch.zeros(4, 9), torch.zeros(4)), total)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", [Masked, Routed])
def test_on_a_gpu_a_step_costs_what_it_costs_on_a_cpu(kind: type[nn.Module]) -> None:
    model, batch = prepared(kind)
    here = measured_profile(model, batch, total, on_gpu=False)
    model = model.cuda()
    chance = torch.cuda.get_rng_state()
    there = measured_profile(model, batch, total)  # the batch follows the model
    assert there.flops(8) == here.flops(8)
    assert there.saved_bytes(8) == pytest.approx(here.saved_bytes(8), rel=0.2)
    assert torch.equal(torch.cuda.get_rng_state(), chance)
    layers = [
        {o.layer for s in found.stretches for o in s.operators if s.phase == "backward"} for found in (here, there)
    ]
    assert layers[0] == layers[1]


# ---- a detector


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """What torchvision's operator computes, for where it was built for another torch."""
    kept: list[int] = []
    overlap = load("torchvision.ops.boxes.box_iou")(boxes, boxes)
    for number in scores.argsort(descending=True).tolist():
        if not kept or float(overlap[number, kept].max()) <= threshold:
            kept.append(number)
    return torch.tensor(kept, dtype=torch.long)


@pytest.mark.soak
def test_a_detector_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    build = load("torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn")
    if not load("torchvision.extension._has_ops")():
        monkeypatch.setattr(load("torchvision.ops.boxes.nms").__module__ + ".nms", _nms)
        monkeypatch.setattr(torch._dynamo.config, "disable", True)  # or it would compile its other operator
    torch.manual_seed(0)
    model = build(
        weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=96, rpn_pre_nms_top_n_train=40
    )
    pictures = list(images(2, 3, 64)[0])
    targets = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in range(2)]
    batch = (pictures, targets, targets)

    def losses(output: dict[str, Tensor], _: Any) -> Tensor:
        return torch.stack(list(output.values())).sum()

    chance = torch.get_rng_state()
    found, based_on = profile_or_measure(model, batch, losses, on_gpu=False)
    assert based_on == "measured steps at batches 1 and 2"
    torch.set_rng_state(chance)
    assert found.saved_bytes(2) == saved_in(model, batch, losses)
    torch.set_rng_state(chance)
    with FlopCounterMode(display=False) as counter:  # of backward it counts groups of channels wrongly
        model(pictures, targets)
    assert found.flops(2, "forward") == counter.get_total_flops()

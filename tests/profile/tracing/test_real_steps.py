"""Models whose shapes depend on their data are profiled by real steps. The profile equals these steps, and neither the
model nor the random generators change."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.blocks.recompute import Recompute
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.real_steps import measure_profile, trace_or_measure_profile
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from meshwright.user.call import load
from tests.profile.models import image_batch, small_model
from tests.soaked import all_but

Loss = Callable[[Any, Any], Tensor]


class Masked(nn.Module):
    """Computes with the samples that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        out: Tensor = self.second(x[x.sum(-1) > 0]).relu()
        return out


class Looping(nn.Module):
    """Runs a layer with dropout, as often as the values of its input say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().max().item())):
            x = self.dropout(self.layer(x))
        return x


class Routed(nn.Module):
    """Sends each sample to one of its parts, which are not known as experts by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, part_of_sample = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, part in enumerate(self.parts):
            (rows,) = torch.where(part_of_sample == number)
            if len(rows):
                out = out.index_add(0, rows, part(x[rows]) * weight[rows, None])
        return out


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def model_and_batch(kind: type[nn.Module], batch: int = 8) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return kind(), (torch.randn(batch, 8), torch.zeros(batch))


MODELS = (Masked, Looping, Routed)


def counted_flops(model: nn.Module, batch: Any, loss: Loss) -> int:
    with FlopCounterMode(display=False) as counter:
        loss(model(*batch[:-1]), batch[-1]).backward()
    return counter.get_total_flops()


def saved_bytes_of(model: nn.Module, batch: Any, loss: Loss) -> int:
    existing = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    existing |= {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(batch)}
    saved: dict[int, int] = {}
    tensors: list[Tensor] = []  # kept alive, so that no address is used twice

    def note_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in existing:
            saved[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
        loss(model(*batch[:-1]), batch[-1])
    return sum(saved.values())


@pytest.mark.parametrize("kind", MODELS)
def test_a_measured_profile_equals_the_real_step(kind: type[nn.Module]) -> None:
    model, batch = model_and_batch(kind)
    with pytest.raises(InputError, match="cannot be traced"):
        trace_profile(model, batch, mean_square)
    rng_state = torch.get_rng_state()
    profile, based_on = trace_or_measure_profile(model, batch, mean_square, on_gpu=False)
    assert based_on == "measured steps at batches 4 and 8"
    assert profile.traced_batches == (4, 8)
    torch.set_rng_state(rng_state)
    assert profile.saved_bytes(8) == saved_bytes_of(model, batch, mean_square) > 0
    torch.set_rng_state(rng_state)
    assert profile.flops(8) == counted_flops(model, batch, mean_square) > 0


@pytest.mark.parametrize("kind", MODELS)
def test_measuring_changes_neither_the_model_nor_the_random_generators(kind: type[nn.Module]) -> None:
    model, batch = model_and_batch(kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = batch[0].clone()
    rng_state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    measure_profile(model, batch, mean_square)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(batch[0], inputs)
    assert torch.equal(torch.get_rng_state(), rng_state[0])
    assert random.getstate() == rng_state[1]
    assert (numpy.random.get_state()[1] == rng_state[2]).all()  # type: ignore[index]


@pytest.mark.parametrize("name", all_but({"mnist", "gpt"}, ["mnist", "resnet18", "gpt", "llama", "encoder"]))
def test_measured_and_traced_profiles_agree(name: str) -> None:
    model, batch, loss = small_model(name, batch=6)
    traced = trace_profile(model, batch, loss, on_gpu=False, merge_equal_blocks=False)
    measured = measure_profile(model, batch, loss, on_gpu=False)
    assert measured.parameters == traced.parameters
    adamw = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=True)
    for size in (3, 6, 60):
        assert measured.flops(size) == pytest.approx(traced.flops(size))
        assert measured.saved_bytes(size) == pytest.approx(traced.saved_bytes(size))
        memory = [predict_memory(profile, Plan(), size, adamw, CUDA_MEMORY) for profile in (measured, traced)]
        assert sum(memory[0].breakdown.values()) == pytest.approx(sum(memory[1].breakdown.values()), rel=1e-3)


@pytest.mark.parametrize("kind", all_but({"full"}, ["none", "selective", "full"]))
def test_recomputation_is_measured(kind: Recompute) -> None:
    model, batch, loss = small_model("gpt", batch=4)
    traced = trace_profile(model, batch, loss, on_gpu=False, merge_equal_blocks=False, recompute=kind)
    measured = measure_profile(model, batch, loss, on_gpu=False, recompute=kind)
    assert measured.recompute == kind
    assert measured.saved_bytes(4) == traced.saved_bytes(4)
    assert measured.flops(4) == traced.flops(4)


def test_activations_grow_with_the_batch_and_gradients_do_not() -> None:
    model, batch = model_and_batch(Masked)
    profile = measure_profile(model, batch, mean_square)
    gradients = [c.bytes for s in profile.segments for c in s.changes if c.role == "gradient"]
    assert sum(g.at(800) for g in gradients) == sum(p.numel() * 4 for p in model.parameters())
    first = [o for s in profile.segments for o in s.operators if o.layer == "first" and o.kind == "matmul"]
    assert first[0].flops.at(80) == 80 * 2 * 8 * 16


def test_a_batch_of_one_sample_is_measured_once() -> None:
    model, batch = model_and_batch(Looping, batch=1)
    profile, based_on = trace_or_measure_profile(model, batch, mean_square, on_gpu=False)
    assert (profile.traced_batches, based_on) == ((1,), "measured steps at batch 1")


@pytest.mark.soak
def test_half_precision_is_measured() -> None:
    model, batch, loss = small_model("llama", batch=4)
    traced = trace_profile(model, batch, loss, precision="bf16", on_gpu=False, merge_equal_blocks=False)
    on_cpu, on_gpu = (measure_profile(model, batch, loss, precision="bf16", on_gpu=gpu) for gpu in (False, True))
    assert on_cpu.saved_bytes(4) == traced.saved_bytes(4) <= on_gpu.saved_bytes(4)


def test_a_model_that_can_be_traced_does_not_run() -> None:
    model, batch, loss = small_model("mnist")
    model.register_forward_hook(lambda *_: pytest.fail("the model ran") if not _is_fake(_[2]) else None)
    assert trace_or_measure_profile(model, batch, loss)[1] == "traced steps at batches 2, 3 and 5"


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("on_meta", ["model", "sample"])
def test_a_model_without_values_is_refused_with_what_could_not_be_traced(on_meta: str) -> None:
    model, batch = model_and_batch(Masked)
    if on_meta == "model":
        model = model.to("meta")
    else:
        batch = tuple(tensor.to("meta") for tensor in batch)
    with pytest.raises(InputError, match=r"cannot be traced in its forward pass \(Masked\): .* no real step can be"):
        trace_or_measure_profile(model, batch, mean_square)
    with pytest.raises(InputError, match=r"without values \(on the meta device\), so no real step can be measured"):
        measure_profile(model, batch, mean_square)


def test_a_step_that_fails_names_the_line_and_the_module() -> None:
    with pytest.raises(
        InputError, match=r"a real step of the model fails: RuntimeError: .* \(.*, line \d+\)"
    ) as caught:
        measure_profile(Masked(), (torch.zeros(4, 9), torch.zeros(4)), mean_square)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"cannot be traced in \w+ \(Linear\)"):
        trace_or_measure_profile(Masked(), (torch.zeros(4, 9), torch.zeros(4)), mean_square)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", [Masked, Routed])
def test_on_a_gpu_a_step_costs_what_it_costs_on_a_cpu(kind: type[nn.Module]) -> None:
    model, batch = model_and_batch(kind)
    on_cpu = measure_profile(model, batch, mean_square, on_gpu=False)
    model = model.cuda()
    rng_state = torch.cuda.get_rng_state()
    on_gpu = measure_profile(model, batch, mean_square)  # the batch is moved to the model's device
    assert on_gpu.flops(8) == on_cpu.flops(8)
    assert on_gpu.saved_bytes(8) == pytest.approx(on_cpu.saved_bytes(8), rel=0.2)
    assert torch.equal(torch.cuda.get_rng_state(), rng_state)
    layers = [
        {o.layer for s in profile.segments for o in s.operators if s.phase == "backward"}
        for profile in (on_cpu, on_gpu)
    ]
    assert layers[0] == layers[1]


# ---- a detector


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Computes what torchvision's operator does, for a torchvision that was built for another torch."""
    selected: list[int] = []
    overlap = load("torchvision.ops.boxes.box_iou")(boxes, boxes)
    for number in scores.argsort(descending=True).tolist():
        if not selected or float(overlap[number, selected].max()) <= threshold:
            selected.append(number)
    return torch.tensor(selected, dtype=torch.long)


@pytest.mark.soak
def test_a_detector_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    build = load("torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn")
    if not load("torchvision.extension._has_ops")():
        monkeypatch.setattr(load("torchvision.ops.boxes.nms").__module__ + ".nms", _nms)
        monkeypatch.setattr(torch._dynamo.config, "disable", True)  # otherwise it would compile its other operator
    torch.manual_seed(0)
    model = build(
        weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=96, rpn_pre_nms_top_n_train=40
    )
    pictures = list(image_batch(2, 3, 64)[0])
    targets = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in range(2)]
    batch = (pictures, targets, targets)

    def losses(output: dict[str, Tensor], _: Any) -> Tensor:
        return torch.stack(list(output.values())).sum()

    rng_state = torch.get_rng_state()
    profile, based_on = trace_or_measure_profile(model, batch, losses, on_gpu=False)
    assert based_on == "measured steps at batches 1 and 2"
    torch.set_rng_state(rng_state)
    assert profile.saved_bytes(2) == saved_bytes_of(model, batch, losses)
    torch.set_rng_state(rng_state)
    # Of the forward pass only: the counter ignores groups of channels in the backward pass.
    with FlopCounterMode(display=False) as counter:
        model(pictures, targets)
    assert profile.flops(2, "forward") == counter.get_total_flops()

"""A profile tells what real steps do, without running them, and equal blocks traced once cost what all of them do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.call import load
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.repeats import find_runs
from meshwright.profile.tracing.trace import profile
from meshwright.simulator.memory.peak import CUDA_MEMORY, predict_memory
from meshwright.workloads.text.decoder_sizes import decoder
from tests.profile.models import make, scores_loss, tiny_decoder
from tests.profile.structure.structured import ids, transformer

MODELS = ("mnist", "vgg", "resnet18", "gpt", "llama", "encoder")


def meta_images(batch: int = 2) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        return torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)


def meta_tokens(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        tokens = torch.empty(batch, length, dtype=torch.long)
    return tokens, tokens


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_those_that_autograd_saves_in_a_real_step(name: str) -> None:
    model, batch, loss = make(name, batch=6)
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), *batch]}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no memory is given out twice

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss(model(batch[0]), batch[1])
    assert profile(model, batch, loss, on_gpu=False).saved_bytes(6) == sum(saved.values())


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts_in_a_real_step(name: str) -> None:
    model, batch, loss = make(name, batch=6)
    # Torch's counter does not know the CPU's fused attention; as products it does.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            loss(model(batch[0]), batch[1]).backward()
        found = profile(model, batch, loss, on_gpu=False)
    assert found.flops(6) == counter.get_total_flops()


def layer_flops(model: nn.Module, image: Tensor) -> float:
    """Forward FLOPs of convolutions and linear layers by hand: two a weight and output position."""
    total = 0.0

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += 2 * module.weight.numel() * output.shape[2] * output.shape[3]
        elif isinstance(module, nn.Linear):
            total += 2 * module.weight.numel()

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    model.eval()(image)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ["vgg16", "resnet50"])
def test_flops_of_convolutional_nets_are_the_closed_form(name: str) -> None:
    with torch.device("meta"):
        model = load(f"torchvision.models.{name}")()
    forward = layer_flops(model, torch.empty(1, 3, 224, 224, device="meta"))
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    outputs = {"vgg16": 224 * 224, "resnet50": 112 * 112}[name]
    unneeded = 2 * first.weight.numel() * outputs  # nobody asks for the gradient of the image
    found = profile(model.train(), meta_images(), scores_loss)
    assert found.flops(8, "forward") == pytest.approx(8 * forward, rel=1e-3)
    assert found.flops(8, "backward") == pytest.approx(8 * (2 * forward - unneeded), rel=1e-3)


@pytest.mark.parametrize("groups", [1, 8])
def test_grouped_convolutions_cost_their_groups_only(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=groups), nn.Conv2d(8, 8, 3, groups=groups), nn.Flatten())
    sample = (torch.zeros(2, 8, 7, 7), torch.zeros(2, dtype=torch.long))
    per_filter = 2 * 9 * 8 // groups
    first, second = 8 * 5 * 5 * per_filter, 8 * 3 * 3 * per_filter
    found = profile(model, sample, scores_loss)
    assert found.flops(1, "forward") == first + second
    assert found.flops(1, "backward") == first + 2 * second


def test_flops_of_gpt2_are_the_closed_form() -> None:
    with torch.device("meta"):
        model = decoder("gpt2")
    layers, hidden, length, vocabulary = 12, 768, 1024, 50257
    products = 2 * (layers * 12 * hidden**2 + hidden * vocabulary) * length
    attention = layers * 4 * length**2 * hidden
    found = profile(model, meta_tokens(length), scores_loss)
    assert found.flops(1, "forward") == pytest.approx(products + attention, rel=1e-3)
    assert found.flops(1, "backward") == pytest.approx(2 * products + 2.5 * attention, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_blocks_traced_once_cost_what_all_of_them_do(precision: str) -> None:
    model = tiny_decoder(layers=12)
    assert [len(run.blocks) for run in find_runs(model)] == [12]
    sample = meta_tokens(16)
    once = profile(model, sample, scores_loss, precision=precision)
    each = profile(model, sample, scores_loss, precision=precision, repeats=False)
    assert len(once.stretches) > len(each.stretches)
    adamw = optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), at_once=True)
    for batch in (1, 7, 512):
        assert once.flops(batch) == each.flops(batch)
        assert once.saved_bytes(batch) == each.saved_bytes(batch)
        whole = [predict_memory(found, Plan(), batch, adamw, CUDA_MEMORY) for found in (once, each)]
        assert whole[0].breakdown == whole[1].breakdown
        assert whole[0].peak_at == whole[1].peak_at


def test_a_model_that_counts_its_blocks_itself_is_traced_block_by_block() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for number in range(8):
                x = self.blocks[number](x)
            return x

    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    assert profile(Counting(), sample, F.cross_entropy).flops(2, "forward") == 8 * 2 * 2 * 16


def test_frozen_blocks_are_traced_one_by_one() -> None:
    model = tiny_decoder(layers=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm."))
    found = profile(model, meta_tokens(16), scores_loss)
    assert found.flops(1, "backward") < found.flops(1, "forward") / 2
    assert sum(p.trainable for p in found.parameters) == 2


def test_samples_that_are_compared_with_each_other_cost_by_the_square() -> None:
    model = nn.Linear(8, 8, bias=False)
    sample = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))

    def in_batch(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ output.T, target)

    found = profile(model, sample, in_batch, on_gpu=False)
    assert found.flops(10, "forward") == 2 * 10 * 8 * 8 + 2 * 10 * 10 * 8


def test_tied_weights_count_once_and_the_model_is_left_alone() -> None:
    model = tiny_decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = profile(model, meta_tokens(16), scores_loss)
    assert found.parameter_count == sum(p.numel() for p in model.parameters())
    assert ("embedding.weight", "head.weight") in [parameter.names for parameter in found.parameters]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_traced_is_named() -> None:
    class Peeking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    model = nn.Sequential(nn.Linear(4, 4), Peeking())
    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"cannot be traced in 1 \(Peeking\)"):
        profile(model, sample, F.cross_entropy)


def test_a_batch_that_does_not_fit_the_model_is_one_line() -> None:
    sample = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"cannot be traced in 0 \(Linear\)"):
        profile(nn.Sequential(nn.Linear(4, 4)), sample, F.cross_entropy)


def _logits_mean(outputs: Any, batch: Any) -> Tensor:
    return outputs["logits"].float().mean()


def _without_cache(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    model: Any = transformer(name)
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_attention_of_the_transformers_library_is_as_causal_as_it_runs(name: str) -> None:
    """It looks at positions to tell, which a trace has no numbers for."""

    def causal(batch: Any) -> list[float]:
        found = profile(_without_cache(name), batch, _logits_mean)
        return [o.shape[-1].at(4) for part in found.stretches for o in part.operators if o.kind == "attention"]

    assert set(causal(ids())) == {1}
    positions = torch.arange(8).repeat(4, 2)  # two sequences in a row, which it masks from each other
    assert set(causal({**ids(), "position_ids": positions})) == {0}


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_what_is_split_of_the_transformers_library_is_what_its_layers_are(name: str) -> None:
    """Two passes are laid side by side, which must have the same operators."""
    found = profile(_without_cache(name), ids(), _logits_mean, structured=True)
    assert found.structure is not None
    homes = {split.module: group.name for group in found.structure.splits for split in group.splits}
    products = [o for part in found.stretches for o in part.operators if o.kind == "matmul" and o.layer in homes]
    assert len(products) > 12
    assert all(one.split == homes[one.layer] for one in products)

"""A traced profile equals what real steps cost, and merging equal blocks does not change it."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.equal_blocks import find_equal_blocks
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile, SplitMark
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from meshwright.user.call import load
from meshwright.workloads.text.decoder_sizes import decoder
from tests.profile.models import scores_loss, small_model, tiny_decoder
from tests.profile.structure.structured_models import token_ids, transformers_model
from tests.soaked import all_but

CONVOLUTIONAL = ("mnist", "vgg", "resnet18")
MODELS = (*CONVOLUTIONAL, "gpt", "llama", "encoder")
QUICK = ("mnist", "vgg", "gpt")


def meta_images(batch: int = 2) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        return torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)


def meta_tokens(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        tokens = torch.empty(batch, length, dtype=torch.long)
    return tokens, tokens


@cache
def traced_on_cpu(name: str) -> ModelProfile:
    return trace_profile(*small_model(name, batch=6), on_gpu=False)


@pytest.mark.parametrize("name", all_but(QUICK, MODELS))
def test_saved_bytes_are_those_that_autograd_saves_in_a_real_step(name: str) -> None:
    model, batch, loss = small_model(name, batch=6)
    existing = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), *batch]}
    saved: dict[int, int] = {}
    tensors: list[Tensor] = []  # kept alive, so that no address is used twice

    def note_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in existing:
            saved[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
        loss(model(batch[0]), batch[1])
    assert traced_on_cpu(name).saved_bytes(6) == sum(saved.values())


@pytest.mark.parametrize("name", all_but(QUICK, MODELS))
def test_flops_are_those_that_torch_counts_in_a_real_step(name: str) -> None:
    model, batch, loss = small_model(name, batch=6)
    # torch's counter does not know the fused attention of the CPU, so attention runs as matrix products.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            loss(model(batch[0]), batch[1]).backward()
        # Without attention, the profile of the other test is the same.
        profile = traced_on_cpu(name) if name in CONVOLUTIONAL else trace_profile(model, batch, loss, on_gpu=False)
    assert profile.flops(6) == counter.get_total_flops()


def layer_flops(model: nn.Module, image: Tensor) -> float:
    """Forward FLOPs of convolutions and linear layers by the closed form: two per weight and output position."""
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


def one_bottleneck_per_stage() -> nn.Module:
    """ResNet-50 without the equal bottlenecks that follow the first one of each stage."""
    resnet: nn.Module = load("torchvision.models.resnet.ResNet")(
        load("torchvision.models.resnet.Bottleneck"), [1, 1, 1, 1]
    )
    return resnet


@pytest.mark.parametrize("name", all_but([], ["vgg16", "resnet"]))
def test_flops_of_convolutional_nets_are_the_closed_form(name: str) -> None:
    with torch.device("meta"):
        model = load("torchvision.models.vgg16")() if name == "vgg16" else one_bottleneck_per_stage()
    forward = layer_flops(model, torch.empty(1, 3, 224, 224, device="meta"))
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    outputs = {"vgg16": 224 * 224, "resnet": 112 * 112}[name]
    image_gradient = 2 * first.weight.numel() * outputs  # is not computed
    profile = trace_profile(model.train(), meta_images(), scores_loss)
    assert profile.flops(8, "forward") == pytest.approx(8 * forward, rel=1e-3)
    assert profile.flops(8, "backward") == pytest.approx(8 * (2 * forward - image_gradient), rel=1e-3)


@pytest.mark.parametrize("groups", [1, 8])
def test_flops_of_grouped_convolutions_are_those_of_their_groups(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=groups), nn.Conv2d(8, 8, 3, groups=groups), nn.Flatten())
    sample = (torch.zeros(2, 8, 7, 7), torch.zeros(2, dtype=torch.long))
    per_filter = 2 * 9 * 8 // groups
    first, second = 8 * 5 * 5 * per_filter, 8 * 3 * 3 * per_filter
    profile = trace_profile(model, sample, scores_loss)
    assert profile.flops(1, "forward") == first + second
    assert profile.flops(1, "backward") == first + 2 * second


def test_flops_of_gpt2_are_the_closed_form() -> None:
    with torch.device("meta"):
        model = decoder("gpt2")
    layers, hidden, length, vocabulary = 12, 768, 1024, 50257
    products = 2 * (layers * 12 * hidden**2 + hidden * vocabulary) * length
    attention = layers * 4 * length**2 * hidden
    profile = trace_profile(model, meta_tokens(length), scores_loss)
    assert profile.flops(1, "forward") == pytest.approx(products + attention, rel=1e-3)
    assert profile.flops(1, "backward") == pytest.approx(2 * products + 2.5 * attention, rel=1e-3)


@pytest.mark.parametrize("precision", all_but({"fp32"}, ["fp32", "bf16"]))
def test_equal_blocks_traced_once_cost_as_much_as_all_traced(precision: str) -> None:
    model = tiny_decoder(layers=6)
    assert [len(row.skipped) for row in find_equal_blocks(model)] == [3]
    sample = meta_tokens(16)
    merged = trace_profile(model, sample, scores_loss, precision=precision)
    unmerged = trace_profile(model, sample, scores_loss, precision=precision, merge_equal_blocks=False)
    assert len(merged.segments) > len(unmerged.segments)
    adamw = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=True)
    for batch in (1, 7, 512):
        assert merged.flops(batch) == unmerged.flops(batch)
        assert merged.saved_bytes(batch) == unmerged.saved_bytes(batch)
        memory = [predict_memory(profile, Plan(), batch, adamw, CUDA_MEMORY) for profile in (merged, unmerged)]
        assert memory[0].breakdown == memory[1].breakdown
        assert memory[0].peak_at == memory[1].peak_at


def test_of_a_linear_model_two_batch_sizes_show_what_recomputation_changes() -> None:
    model, batch = tiny_decoder(), meta_tokens(16)
    profiles = [
        trace_profile(model, batch, scores_loss, recompute="full", is_linear=is_linear) for is_linear in (False, True)
    ]
    assert [profile.traced_batches for profile in profiles] == [(2, 3, 5), (2, 3)]
    assert profiles[0].segments == profiles[1].segments


def test_a_model_that_counts_its_blocks_itself_is_traced_block_by_block() -> None:
    class CountsBlocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for number in range(8):
                x = self.blocks[number](x)
            return x

    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    assert trace_profile(CountsBlocks(), sample, F.cross_entropy).flops(2, "forward") == 8 * 2 * 2 * 16


def test_frozen_blocks_are_traced_one_by_one() -> None:
    model = tiny_decoder(layers=5)
    assert find_equal_blocks(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm."))
    profile = trace_profile(model, meta_tokens(16), scores_loss)
    assert profile.flops(1, "backward") < profile.flops(1, "forward") / 2
    assert sum(p.trainable for p in profile.parameters) == 2


def test_the_cost_of_comparing_samples_grows_quadratically() -> None:
    model = nn.Linear(8, 8, bias=False)
    sample = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))

    def contrastive_loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ output.T, target)

    profile = trace_profile(model, sample, contrastive_loss, on_gpu=False)
    assert profile.flops(10, "forward") == 2 * 10 * 8 * 8 + 2 * 10 * 10 * 8


class _OtherOperatorsFrom7Samples(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs.relu() if len(x) >= 7 else outputs


def test_a_model_that_runs_other_operators_on_larger_batches_is_refused() -> None:
    def loss(outputs: Tensor, _: Any) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))  # quadratic in the batch

    with pytest.raises(InputError, match="other operators on 7 samples"):
        trace_profile(_OtherOperatorsFrom7Samples(4, 3), (torch.zeros(2, 4), torch.zeros(2)), loss)


def test_tied_weights_count_once_and_tracing_does_not_change_the_model() -> None:
    model = tiny_decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = trace_profile(model, meta_tokens(16), scores_loss)
    assert profile.parameter_count == sum(p.numel() for p in model.parameters())
    assert ("embedding.weight", "head.weight") in [parameter.names for parameter in profile.parameters]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_module_that_cannot_be_traced_is_named() -> None:
    class ReadsValues(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    model = nn.Sequential(nn.Linear(4, 4), ReadsValues())
    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"cannot be traced in 1 \(ReadsValues\)"):
        trace_profile(model, sample, F.cross_entropy)


def test_a_batch_that_does_not_fit_names_the_module() -> None:
    sample = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"cannot be traced in 0 \(Linear\)"):
        trace_profile(nn.Sequential(nn.Linear(4, 4)), sample, F.cross_entropy)


def _logits_mean(outputs: Any, batch: Any) -> Tensor:
    return outputs["logits"].float().mean()


def _without_cache(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    model: Any = transformers_model(name)
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("name", all_but({"LlamaForCausalLM"}, ["GPT2LMHeadModel", "LlamaForCausalLM"]))
def test_attention_of_the_transformers_library_is_traced_as_causal_as_it_runs(name: str) -> None:
    """The library decides by the values of positions, which fake tensors do not have."""

    def causal(batch: Any) -> list[float]:
        profile = trace_profile(_without_cache(name), batch, _logits_mean)
        return [o.shape[-1].at(4) for segment in profile.segments for o in segment.operators if o.kind == "attention"]

    assert set(causal(token_ids())) == {1}
    positions = torch.arange(8).repeat(4, 2)  # two sequences per row, which the library masks from each other
    assert set(causal({**token_ids(), "position_ids": positions})) == {0}


@pytest.mark.parametrize("name", all_but({"LlamaForCausalLM"}, ["GPT2LMHeadModel", "LlamaForCausalLM"]))
def test_split_marks_of_transformers_models_match_their_layers(name: str) -> None:
    """The marks are matched to operators by number, so both passes must run the same operators."""
    profile = trace_profile(_without_cache(name), token_ids(), _logits_mean, with_structure=True)
    assert profile.structure is not None
    groups = {split.module: group.name for group in profile.structure.splits for split in group.splits}
    operators = [operator for segment in profile.segments for operator in segment.operators]
    matmuls = [operator for operator in operators if operator.kind == "matmul" and operator.layer in groups]
    assert len(matmuls) > 12
    assert all(matmul.split == SplitMark(groups[matmul.layer]) for matmul in matmuls)


def test_a_fused_optimizer_has_a_cost() -> None:
    """It is one operator on lists of tensors, without a shape."""
    cost = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters, fused=True), multi_tensor=False)
    plain = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=False)
    assert 0 < cost.traffic_ratio < plain.traffic_ratio

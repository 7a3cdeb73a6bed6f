"""Small versions of models of torchvision, timm and transformers are profiled, or refused with the failing module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.profile.tracing.trace import trace_profile
from meshwright.user.call import load

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 200,
    "max_position_embeddings": 80,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "use_cache": False}
LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6, "n_embd": 64, "n_head": 4, "use_cache": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SMALL),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {"dim": 64, "n_heads": 4, "hidden_dim": 128}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**SMALL, "embedding_size": 32}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 6, "n_head": 4, "use_cache": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, "use_cache": False}),
}
VISION_MODELS = {
    "torchvision.models.alexnet": 224,
    "torchvision.models.vgg11": 224,
    "torchvision.models.resnet18": 64,
    "torchvision.models.mobilenet_v3_small": 64,
    "torchvision.models.efficientnet_b0": 64,
    "torchvision.models.convnext_tiny": 64,
    "torchvision.models.swin_t": 64,
    "torchvision.models.vit_b_16": 224,
    "torchvision.models.shufflenet_v2_x1_0": 64,
    "torchvision.models.squeezenet1_0": 64,
    "timm.mixer_s32_224": 224,
    "timm.deit_tiny_patch16_224": 224,
    "timm.resnetv2_50": 64,
    "timm.poolformer_s12": 64,
}
QUICK = {"gpt2", "torchvision.models.squeezenet1_0"}


def soak_unless_quick(names: Any) -> list[Any]:
    """The models as test parameters; all but the quick ones run in the soak only."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in names]


def logits_loss(output: Any, target: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    if logits.dim() == 3:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return F.cross_entropy(logits, target)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def language_model(name: str, **options: Any) -> nn.Module:
    pytest.importorskip("transformers")
    model, config, settings = LANGUAGE_MODELS[name]
    return on_meta(lambda: load(f"transformers.{model}")(load(f"transformers.{config}")(**{**settings, **options})))


@pytest.mark.parametrize("name", soak_unless_quick(LANGUAGE_MODELS))
def test_language_models_of_transformers_are_profiled(name: str) -> None:
    tokens = torch.empty(2, 32, dtype=torch.long, device="meta")
    model = language_model(name)
    profile = trace_profile(model, {"input_ids": tokens, "labels": tokens}, logits_loss)
    elements = sum(p.numel() for p in model.parameters())
    assert profile.parameter_count == elements
    assert 2 * profile.flops(1, "forward") == pytest.approx(profile.flops(1, "backward"), rel=0.2)
    assert profile.saved_bytes(4) > profile.saved_bytes(2) > 0


@pytest.mark.parametrize("name", soak_unless_quick(VISION_MODELS))
def test_vision_models_are_profiled(name: str) -> None:
    if name.startswith("timm."):
        pytest.importorskip("timm")
        model = on_meta(lambda: load("timm.create_model")(name.removeprefix("timm.")))
    else:
        model = on_meta(load(name))
    size = VISION_MODELS[name]
    images = torch.empty(2, 3, size, size, device="meta")
    profile = trace_profile(model, (images, torch.empty(2, dtype=torch.long, device="meta")), logits_loss)
    assert profile.parameter_count == sum(p.numel() for p in model.parameters())
    assert profile.flops(6, "forward") == pytest.approx(3 * profile.flops(2, "forward"))
    assert profile.saved_bytes(4) > profile.saved_bytes(2) > 0


def test_a_model_that_reads_tensor_values_is_refused_with_the_module_and_the_line() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Deciding()))
    inputs = torch.empty(2, 4, device="meta")
    with pytest.raises(
        InputError, match=r"1 \(Deciding\): its code depends on the values of tensors \(.*test_zoo.py, line 107\)"
    ):
        trace_profile(model, (inputs, inputs), nn.functional.mse_loss)


@pytest.mark.soak
def test_a_model_that_skips_layers_at_random_is_traced() -> None:
    pytest.importorskip("transformers")
    config = load("transformers.OPTConfig")(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, word_embed_proj_dim=64, use_cache=False
    )
    model = on_meta(lambda: load("transformers.OPTForCausalLM")(config))
    tokens = torch.empty(2, 32, dtype=torch.long, device="meta")
    profile = trace_profile(model, {"input_ids": tokens, "labels": tokens}, logits_loss)
    assert len(profile.parameters) == len(list(model.parameters()))

"""Small models of torchvision, timm and transformers, with a batch and a loss each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.user.torchvision_import import mend_torchvision

CLASSES, WORDS, LENGTH, SAMPLES = 10, 64, 16, 2


@dataclass(frozen=True)
class Case:
    """A model, a batch of it, and a loss function; None if the model computes its loss itself."""

    model: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None


def _pictures(size: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, size, size, generator=generator), torch.arange(SAMPLES)


def _torchvision(name: str, **options: Any) -> nn.Module:
    mend_torchvision()
    model: nn.Module = getattr(import_module("torchvision.models"), name)(num_classes=CLASSES, **options)
    return model


def _timm(name: str, **options: Any) -> nn.Module:
    mend_torchvision()
    model: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **options)
    return model


def _vit(layers: int = 1) -> nn.Module:
    mend_torchvision()
    kind = import_module("torchvision.models").VisionTransformer
    return kind(64, 16, layers, 2, 16, 32, dropout=0.1, num_classes=CLASSES)


def _swin(version: int) -> nn.Module:
    mend_torchvision()
    module = import_module("torchvision.models.swin_transformer")
    blocks = {} if version == 1 else {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return module.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2], num_classes=CLASSES, **blocks)


_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 32),
    "vocab_size": WORDS,
    "d_kv": 8,
    "head_dim": 8,
    "pad_token_id": 0,
    "use_cache": False,
    "word_embed_proj_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _transformers(name: str, **options: Any) -> nn.Module:
    mend_torchvision()
    kind = getattr(import_module("transformers"), name)
    config = kind.config_class()
    for field, value in {**_SIZES, **options}.items():
        is_property = isinstance(getattr(type(config), field, None), property)
        if (hasattr(config, field) and not is_property) or field == "decoder_start_token_id":
            setattr(config, field, value)
    if hasattr(config, "layer_types") and config.layer_types:  # of the default number of layers
        config.layer_types = config.layer_types[-2:]
    return kind(config)


def _tokens(*more: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens, **dict.fromkeys(more, tokens)}


def _loss_of_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _images(build: Callable[..., nn.Module], name: str, size: int = 64, **options: Any) -> Case:
    return Case(partial(build, name, **options), _pictures(size), F.cross_entropy)


def _language(name: str, loss: Any = None, **options: Any) -> Case:
    return Case(partial(_transformers, name, **options), _tokens(), loss)


_CLASSIFIED = {"input_ids": _tokens()["input_ids"], "labels": torch.tensor([0, 1])}

# In `make test`.
QUICK: dict[str, Case] = {
    "torchvision squeezenet1_1": _images(_torchvision, "squeezenet1_1"),
    "torchvision vit": Case(_vit, _pictures(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "torchvision alexnet": _images(_torchvision, "alexnet"),
    "timm vit_tiny_patch16_224": _images(_timm, "vit_tiny_patch16_224", img_size=64, depth=2),
    "timm convnext_atto": _images(_timm, "convnext_atto", depths=(1, 1, 1, 1), drop_path_rate=0.1),
    "timm deit_tiny_patch16_224": _images(_timm, "deit_tiny_patch16_224", img_size=64, depth=2),
    "transformers GPT2LMHeadModel": _language("GPT2LMHeadModel"),
    "transformers LlamaForCausalLM": _language("LlamaForCausalLM"),
    "transformers LlamaForCausalLM, loss outside": _language("LlamaForCausalLM", _loss_of_logits),
    "transformers BertForMaskedLM": _language("BertForMaskedLM"),
    "transformers DistilBertForMaskedLM": _language("DistilBertForMaskedLM"),
    "transformers BertForSequenceClassification": Case(
        partial(_transformers, "BertForSequenceClassification"), _CLASSIFIED, None
    ),
}

_TORCHVISION = (
    *("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "vgg11_bn", "mobilenet_v2"),
    *("mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_b0", "efficientnet_v2_s"),
    *("regnet_y_400mf", "convnext_tiny"),
)
_TIMM_CONVOLUTIONS = (
    *("resnet26", "resnetv2_50", "ecaresnet26t", "repvgg_a0", "efficientnet_lite0", "mobilenetv3_small_050"),
    *("ghostnet_100", "hrnet_w18_small", "dla34", "poolformer_s12"),
)
_TIMM: dict[str, dict[str, Any]] = {
    **{name: {} for name in _TIMM_CONVOLUTIONS},
    "mixer_s32_224": {"img_size": 64},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 24, "window_size": 2},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
}
_TRANSFORMERS = (
    *("RobertaForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM", "MobileBertForMaskedLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "BloomForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GemmaForCausalLM", "PhiForCausalLM", "FalconForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration"),
    *("BartForConditionalGeneration", "MPNetForMaskedLM", "XGLMForCausalLM"),
)

# In the soak.
LONG: dict[str, Case] = {
    **{f"torchvision {name}": _images(_torchvision, name) for name in _TORCHVISION},
    "torchvision swin": Case(partial(_swin, 1), _pictures(32), F.cross_entropy),
    "torchvision swin v2": Case(partial(_swin, 2), _pictures(32), F.cross_entropy),
    **{f"timm {name}": _images(_timm, name, options.get("img_size", 64), **options) for name, options in _TIMM.items()},
    **{f"transformers {name}": _language(name) for name in _TRANSFORMERS},
    "transformers GPT2ForSequenceClassification": Case(
        partial(_transformers, "GPT2ForSequenceClassification"), _CLASSIFIED, None
    ),
}

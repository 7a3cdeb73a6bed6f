"""Language models of transformers that predict the next token, built from configurations. Nothing is downloaded."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.user.call import load
from validation.speed.sweep.case import ModelCase, Sizes

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def from_config(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model class `name` of transformers with the configuration that belongs to it."""
    model_class = load(f"transformers:{name}")
    model: nn.Module = model_class(model_class.config_class(**options))
    return model


def token_batch(sizes: Sizes) -> dict[str, Tensor]:
    tokens = torch.randint(3, sizes["vocabulary"], (sizes["samples"], sizes["length"]))
    return {"input_ids": tokens, "labels": tokens.clone()}


def pair_batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch = token_batch(sizes)
    return batch["input_ids"], batch["labels"]


def logits_loss(output: Any, target: Tensor) -> Tensor:
    scores = output.logits
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def _decoder(
    name: str,
    model_class: str,
    samples: int,
    length: int,
    full: Mapping[str, Any],
    tiny: Mapping[str, Any],
    own_loss: bool = True,
) -> ModelCase:
    """A model that computes its loss itself, or whose loss is beside it."""

    def build(sizes: Sizes) -> nn.Module:
        return from_config(model_class, {**sizes["config"], "use_cache": False})

    def sizes(samples: int, length: int, config: Mapping[str, Any]) -> Sizes:
        return {"samples": samples, "length": length, "vocabulary": config["vocab_size"], "config": config}

    large, small = sizes(samples, length, full), sizes(2, 16, tiny)
    if own_loss:
        return ModelCase(name, "transformers", build, token_batch, large, small)
    return ModelCase(name, "transformers", build, pair_batch, large, small, logits_loss)


def _width(width: int, inner: int, layers: int, heads: int, pairs: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A configuration in the names that most models of transformers use."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        **more,
    }


DECODERS = (
    _decoder(
        "gpt2",
        "GPT2LMHeadModel",
        16,
        1024,
        {"vocab_size": 50257},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128},
        own_loss=False,
    ),
    _decoder(
        "gpt2_xl",
        "GPT2LMHeadModel",
        4,
        1024,
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257},
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 128},
        own_loss=False,
    ),
    _decoder("llama_0.6b", "LlamaForCausalLM", 8, 2048, _width(1536, 4096, 16, 12, 12, 32000), SMALL),
    _decoder("qwen2_0.5b", "Qwen2ForCausalLM", 4, 2048, _width(896, 4864, 24, 14, 2, 32000), SMALL),
    _decoder(
        "qwen3_0.6b",
        "Qwen3ForCausalLM",
        4,
        2048,
        _width(1024, 3072, 28, 16, 8, 32000, head_dim=128),
        {**SMALL, "head_dim": 16},
    ),
    _decoder(
        "gemma2",
        "Gemma2ForCausalLM",
        4,
        1024,
        _width(1024, 4096, 12, 8, 4, 32000, head_dim=128, sliding_window=512),
        {**SMALL, "head_dim": 16, "sliding_window": 8},
    ),
    _decoder(
        "mistral",
        "MistralForCausalLM",
        4,
        2048,
        _width(1024, 3584, 16, 16, 4, 32000, sliding_window=1024),
        {**SMALL, "sliding_window": 8},
    ),
    _decoder(
        "phi3",
        "Phi3ForCausalLM",
        4,
        2048,
        _width(1024, 2816, 16, 16, 16, 32064),
        {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    _decoder(
        "mixtral",
        "MixtralForCausalLM",
        4,
        1024,
        _width(768, 1536, 8, 12, 4, 32000, num_local_experts=8, num_experts_per_tok=2),
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _decoder(
        "falcon",
        "FalconForCausalLM",
        4,
        2048,
        {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000},
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    ),
    _decoder(
        "opt_350m_like",
        "OPTForCausalLM",
        8,
        1024,
        {
            "hidden_size": 1024,
            "word_embed_proj_dim": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "vocab_size": 50272,
        },
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 128,
        },
    ),
    _decoder(
        "bloom",
        "BloomForCausalLM",
        4,
        1024,
        {"hidden_size": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50304},
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    ),
)

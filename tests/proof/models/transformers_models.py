"""Small models of the transformers library, with batches as their users make them: padded rows, ignored labels, and no
loss function, because the models compute their loss themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.call import load

SAMPLES, LENGTH, WORDS = 21, 8, 32
TEXT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**TEXT, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 16}


def _build(model: str, config: str, **options: Any) -> nn.Module:
    module: nn.Module = load(f"transformers:{model}")(load(f"transformers:{config}")(**options))
    return module


@dataclass(frozen=True)
class Case:
    """A model, the kind of its samples, the place where a pipeline cuts it (None if it cannot be cut), and whether its
    layers can be divided among two ranks."""

    build: Callable[[], nn.Module]
    samples: str
    cut: str | None
    tensor: bool = True
    loss: str | None = None


CASES = {
    "llama": Case(lambda: _build("LlamaForCausalLM", "LlamaConfig", **DECODER), "causal", "model.layers.0"),
    "qwen3": Case(lambda: _build("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8), "causal", "model.layers.0"),
    "gpt2": Case(
        lambda: _build(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16
        ),
        "causal",
        "transformer.h.0",
    ),
    "bert": Case(
        lambda: _build("BertForMaskedLM", "BertConfig", **TEXT, intermediate_size=24), "masked", "bert.encoder.layer.0"
    ),
    "bert classification": Case(
        lambda: _build("BertForSequenceClassification", "BertConfig", **TEXT, intermediate_size=24, num_labels=3),
        "classified text",
        "bert.encoder.layer.0",
    ),
    "t5": Case(
        lambda: _build(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        "translated",
        None,
    ),
    "vit": Case(
        lambda: _build(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
            num_labels=3,
        ),
        "pictures",
        "vit.layers.0",
    ),
    "mixtral": Case(
        lambda: _build("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, num_experts_per_tok=2),
        "causal",
        "model.layers.0",
    ),
    "whisper": Case(
        lambda: _build(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=WORDS,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=4,
            max_source_positions=8,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        "speech",
        None,
    ),
}


def build(name: str) -> nn.Module:
    return CASES[name].build()


class Samples(Dataset[dict[str, Tensor]]):
    """Random samples of one kind. Rows have different lengths, so padding and ignored labels differ between ranks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(3, WORDS, (LENGTH,), generator=draw)
        length = 3 + index % (LENGTH - 2)
        mask = (torch.arange(LENGTH) < length).long()
        labels = words.masked_fill(mask == 0, -100)
        label = torch.tensor(-100 if index % 7 == 5 else index % 3)
        if self.kind == "causal":
            return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}
        if self.kind == "masked":
            chosen = torch.rand(LENGTH, generator=draw) < 0.4
            chosen[0] = True
            ids = words.masked_fill(chosen, 1)
            return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.masked_fill(~chosen, -100)}
        if self.kind == "classified text":
            return {"input_ids": words * mask, "attention_mask": mask, "labels": label}
        if self.kind == "translated":
            return {"input_ids": words * mask, "attention_mask": mask, "labels": labels[:6]}
        if self.kind == "pictures":
            return {"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": label}
        return {"input_features": torch.randn(4, 16, generator=draw), "labels": labels[:6]}

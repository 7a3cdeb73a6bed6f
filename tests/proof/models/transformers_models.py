"""Small models of the transformers library, with batches as their users make them: padded rows, ignored labels, and no
loss function, because the models compute their loss themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.user.call import load
from meshwright.workloads.text.decoder import Decoder

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
    "balanced mixtral": Case(
        lambda: _build(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        ),
        "causal",
        None,
    ),
    "balanced qwen3": Case(
        lambda: _build(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
        ),
        "causal",
        None,
    ),
    "qwen3 mixture": Case(
        lambda: _build(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        "causal",
        "model.layers.0",
    ),
    "deepseek": Case(lambda: _deepseek(), "causal", "model.layers.0"),
    "unused expert": Case(lambda: _with_unused_expert(), "causal", "model.layers.0"),
    "decoder with a capacity": Case(lambda: CapacityMixture(), "causal", None),
    "listed experts": Case(lambda: ListedMixture(), "causal", None),
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


def _deepseek() -> nn.Module:
    """A dense layer, then one with shared experts and routing by groups."""
    return _build(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **DECODER,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )


def _with_unused_expert() -> nn.Module:
    """The same with a bias, a buffer of the router, that lets no token choose expert 5."""
    model = _deepseek()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[5] = -100.0
    return model


class CapacityMixture(nn.Module):
    """Our decoder with experts that drop tokens beyond a capacity, and a loss that ignores targets."""

    def __init__(self) -> None:
        super().__init__()
        experts = {"number": 4, "top_k": 2, "capacity": 0.75}
        self.decoder = Decoder(2, 16, 2, LENGTH, WORDS, positions="rotary", feedforward=16, experts=experts)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.decoder(input_ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class ListedMixture(nn.Module):
    """A mixture as many users write it: a list of modules, each called on the rows that are routed to it. Experts
    without rows are left out. A model with its own loss, as those of transformers."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        x = x + self.mix(x.flatten(0, 1)).view_as(x) * attention_mask[..., None]
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def mix(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, choice = torch.where(chosen == number)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return mixed


def build(name: str) -> nn.Module:
    return CASES[name].build()


class Samples(Dataset[dict[str, Tensor]]):
    """Random samples of one kind. Rows have different lengths, so padding and ignored labels differ between ranks."""

    def __init__(self, kind: str, most_words: int = LENGTH) -> None:
        self.kind = kind
        self.most_words = most_words

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(3, WORDS, (self.most_words,), generator=draw)
        length = 3 + index % (self.most_words - 2)
        mask = (torch.arange(self.most_words) < length).long()
        labels = words.masked_fill(mask == 0, -100)
        label = torch.tensor(-100 if index % 7 == 5 else index % 3)
        if self.kind == "causal":
            return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}
        if self.kind == "masked":
            chosen = torch.rand(self.most_words, generator=draw) < 0.4
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

"""Models of transformers that are no plain language models: masked tokens, encoder-decoders, images, speech and text
with images. They are built from configurations, and all of them compute their loss themselves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from validation.speed.sweep.case import ModelCase, Sizes
from validation.speed.sweep.models.decoders import from_config, token_batch


def image_class_batch(sizes: Sizes) -> dict[str, Tensor]:
    samples, side = sizes["samples"], sizes["image"]
    return {"pixel_values": torch.randn(samples, 3, side, side), "labels": torch.randint(0, 2, (samples,))}


def spectrum_batch(sizes: Sizes) -> dict[str, Tensor]:
    """What Whisper reads: a spectrum over time, and the tokens of its text."""
    samples = sizes["samples"]
    labels = torch.randint(3, sizes["vocabulary"], (samples, sizes["length"]))
    return {"input_features": torch.randn(samples, sizes["mels"], sizes["frames"]), "labels": labels}


def wave_batch(sizes: Sizes) -> dict[str, Tensor]:
    """What Wav2Vec2 reads: amplitudes, and the characters of its text."""
    samples = sizes["samples"]
    labels = torch.randint(1, 32, (samples, sizes["length"]))
    return {"input_values": torch.randn(samples, sizes["frames"]), "labels": labels}


def caption_batch(sizes: Sizes) -> dict[str, Any]:
    samples, side = sizes["samples"], sizes["image"]
    return {
        "input_ids": torch.randint(3, sizes["vocabulary"], (samples, sizes["length"])),
        "pixel_values": torch.randn(samples, 3, side, side),
        "return_loss": True,
    }


def _case(
    name: str,
    model_class: str,
    batch: Callable[[Sizes], Any],
    full: Mapping[str, Any],
    tiny: Mapping[str, Any],
    config: Mapping[str, Any],
    tiny_config: Mapping[str, Any],
) -> ModelCase:
    def build(sizes: Sizes) -> nn.Module:
        return from_config(model_class, sizes["config"])

    return ModelCase(name, "transformers", build, batch, {**full, "config": config}, {**tiny, "config": tiny_config})


_TINY_BERT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_TINY_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
_TINY_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_TINY_TEXT = {"samples": 2, "length": 16, "vocabulary": 128}
_TINY_VIT = {**_TINY_BERT, "image_size": 32, "patch_size": 8}
_TINY_VIT.pop("vocab_size")
_CLIP_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _text(samples: int, length: int, vocabulary: int) -> dict[str, int]:
    return {"samples": samples, "length": length, "vocabulary": vocabulary}


ENCODERS = (
    _case("bert", "BertForMaskedLM", token_batch, _text(32, 512, 30522), _TINY_TEXT, {}, _TINY_BERT),
    _case(
        "roberta",
        "RobertaForMaskedLM",
        token_batch,
        _text(32, 512, 50265),
        _TINY_TEXT,
        {"vocab_size": 50265, "max_position_embeddings": 514},
        _TINY_BERT,
    ),
    _case(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        token_batch,
        _text(16, 512, 32000),
        _TINY_TEXT,
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 32000,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
        },
        {**_TINY_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    _case(
        "t5",
        "T5ForConditionalGeneration",
        token_batch,
        _text(16, 512, 32128),
        _TINY_TEXT,
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
        {**_TINY_T5, "decoder_start_token_id": 0},
    ),
    _case(
        "bart",
        "BartForConditionalGeneration",
        token_batch,
        _text(16, 512, 50265),
        _TINY_TEXT,
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        {**_TINY_BART, "vocab_size": 128, "max_position_embeddings": 32},
    ),
    _case(
        "vit_transformers",
        "ViTForImageClassification",
        image_class_batch,
        {"samples": 128, "image": 224},
        {"samples": 2, "image": 32},
        {},
        _TINY_VIT,
    ),
    _case(
        "whisper_base",
        "WhisperForConditionalGeneration",
        spectrum_batch,
        {"samples": 16, "length": 256, "vocabulary": 51865, "mels": 80, "frames": 3000},
        {"samples": 2, "length": 16, "vocabulary": 100, "mels": 8, "frames": 32},
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
        },
        {
            **_TINY_BART,
            "vocab_size": 128,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
    ),
    _case(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        wave_batch,
        {"samples": 8, "length": 48, "frames": 160_000},
        {"samples": 2, "length": 4, "frames": 8000},
        {"apply_spec_augment": False, "layerdrop": 0.0, "ctc_loss_reduction": "mean"},
        {
            **_TINY_BERT,
            "vocab_size": 32,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "ctc_loss_reduction": "mean",
            "conv_dim": [32] * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    _case(
        "clip",
        "CLIPModel",
        caption_batch,
        {"samples": 128, "image": 224, "length": 77, "vocabulary": 49408},
        {"samples": 2, "image": 32, "length": 16, "vocabulary": 128},
        {},
        {
            "text_config": {**_TINY_BERT, **_CLIP_TOKENS},
            "vision_config": _TINY_VIT,
            "projection_dim": 32,
        },
    ),
)

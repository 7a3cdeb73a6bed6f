"""Tiny configs of transformers, one for each kind of model that is trained, as config.json has them."""

import json
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 16,
}
_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
_TOKENS: dict[str, Any] = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **_SIZES},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, **_SIZES},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT2, **_TOKENS},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_SIZES},
    "bert_classes": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **_SIZES},
    "bert_regression": {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "score"},
        **_SIZES,
    },
    "gpt2_classes": {"architectures": ["GPT2ForSequenceClassification"], **_GPT2, **_TOKENS},
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 99,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": 16,
        "patch_size": 8,
        **_SIZES,
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "decoder_start_token_id": 3,
        **_TOKENS,
    },
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **_SIZES},
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Writes config.json with these changes into a new folder, and returns the folder."""
    model_folder = folder / name
    model_folder.mkdir()
    (model_folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return model_folder

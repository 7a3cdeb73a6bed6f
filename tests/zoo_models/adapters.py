"""Models of transformers with adapters of peft, as users build them."""

from typing import Any

import torch
from torch import nn

from meshwright.user.call import load


def with_lora(base: nn.Module, **options: Any) -> nn.Module:
    """Returns the model with LoRA adapters, whose product is not zero as it is at the start of a training."""
    config = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **options}
    model: nn.Module = load("peft:get_peft_model")(base, load("peft:LoraConfig")(init_lora_weights=False, **config))
    return model


def pretrained_with_lora(folder: str, dtype: str = "float32", **options: Any) -> nn.Module:
    """The model of a job: a base with weights from a folder, and adapters."""
    base: Any = load("transformers:AutoModelForCausalLM").from_pretrained(folder, dtype=getattr(torch, dtype))
    base.config.use_cache = False
    return with_lora(base, **options)

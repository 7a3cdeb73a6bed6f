"""Writes the adapters of a model of peft (LoRA and others) as a folder that `PeftModel.from_pretrained` reads, and
reads such a folder."""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.user.call import load

_DEFAULT = "default"  # the adapter that peft writes into the folder itself; others get folders in it


def has_adapters(model: nn.Module) -> bool:
    """Whether this is a model of peft."""
    return "peft" in sys.modules and isinstance(model, load("peft:PeftModel"))


def save_adapters(model: Any, folder: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors. The weights of the base model are not written, except
    embeddings that the adapters train or that were resized."""
    for config in model.peft_config.values():
        base = config.base_model_name_or_path
        if base and not (Path(base) / "config.json").is_file():
            config.base_model_name_or_path = None  # peft would look for it on the network, and then takes it from base
    model.save_pretrained(str(folder))


def read_adapters(model: Any, folder: Path) -> nn.Module:
    """Returns the base model of `model` with the adapters that peft reads from the folder."""
    copy: Any = deepcopy(model)
    base = copy.unload() if hasattr(copy, "unload") else copy.get_base_model()  # prompts change no layer of the base
    name = model.active_adapter
    read = load("peft:PeftModel").from_pretrained(base, str(folder if name == _DEFAULT else folder / name))
    result: nn.Module = read.eval()
    return result

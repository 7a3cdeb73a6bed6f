"""Builds models of Hugging Face's transformers from a config alone, with random weights, without the network and
without code that a config brings along. `read_config` reads a config, `training_kind` says what the model is
trained for, and `build` returns the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import InputError, did_you_mean
from meshwright.files.user_path import user_path
from meshwright.user.call import load

# What models are trained for, and the part of the name of transformers' table of such classes. A model type whose
# config names no class is trained for the first of these that has the type.
KINDS = {
    "speech recognition": "SPEECH_SEQ_2_SEQ",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked language model": "MASKED_LM",
    "causal language model": "CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
}
_MOST_CONFIG_BYTES = 2**24
_MOST_LAYERS = 10_000  # the modules of more layers take minutes and gigabytes to build
# Other implementations that a config can name are downloaded from the Hub and executed.
_IMPLEMENTATIONS_OF_TRANSFORMERS = ("eager", "sdpa")
_TABLES = "transformers.models.auto.modeling_auto"


@dataclass(frozen=True)
class TrainingKind:
    """What a model is trained for (a key of `KINDS`), and the name of the class in transformers."""

    kind: str
    class_name: str


def build(config: str, **changes: Any) -> nn.Module:
    """Returns a model of transformers with random weights. `config` is a folder with config.json, such a file, or a
    model type (`llama`), whose default config is used. The class is the first of the config's `architectures`, of any
    kind, or without it the one of `training_kind`. Each of the `changes` replaces a field of the config:
    `num_hidden_layers: 2`."""
    loaded = read_config(config)
    for name, value in changes.items():
        _change(loaded, name, value, config)
    training = _find_kind(loaded)
    if training is None:
        model_class = _other_class(loaded, config)
    else:
        _set_special_tokens(loaded, training.kind)
        model_class = load(f"transformers:{training.class_name}")
    loaded.use_cache = False  # the cache of keys and values is for generating text
    try:
        model: nn.Module = model_class(loaded)
    except ImportError as error:  # a package that this model needs
        raise InputError(f"hf:{config}: {model_class.__name__} cannot be built: {str(error).strip()}") from None
    return model


def _other_class(config: Any, source: str) -> Any:
    """Returns the class of a model for which there is no generated data here: the class in `architectures`, which has
    to be a model of transformers for this config."""
    named = _named_class(config)
    if named is None:
        raise _no_data(config, source)
    is_name = isinstance(named, str) and named.isidentifier()
    model_class: Any = load(f"transformers:{named}") if is_name else None
    if not (isinstance(model_class, type) and issubclass(model_class, load("transformers:PreTrainedModel"))):
        raise InputError(f"hf:{source}: architectures is {named!r}, which is no class of a model in transformers")
    config_class: Any = getattr(model_class, "config_class", None)  # None for abstract classes
    if config_class is None or not isinstance(config, config_class):
        raise InputError(
            f"hf:{source}: architectures is {named}, whose config is a {getattr(config_class, '__name__', None)}, but"
            f" model_type is {config.model_type}: name a class of this type"
        )
    return model_class


def _set_special_tokens(config: Any, kind: str) -> None:
    """Sets the tokens without which a model of this kind cannot compute its loss, where the config has none."""
    if kind == "sequence classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders that classify look for the last token before the padding
    if kind == "sequence to sequence" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # the decoder's input begins with it


def config_file(config: str) -> Path | None:
    """Returns the absolute path of the config's file. It is None if `config` is a model type."""
    path = user_path(config, "hf:")
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path.resolve()
    if "/" in config or path.suffix or path.name == "config.json":
        raise InputError(
            f"hf:{config}: there is no such folder with config.json, and nothing is downloaded: download the model's"
            " config.json first, and write hf:FOLDER"
        )
    return None


def read_config(config: str) -> Any:
    """Returns the config of transformers that `config` names, as `build` says. The class is always one of transformers'
    own: what names code to download in a config is ignored, such as `auto_map` and kernels for attention."""
    file = config_file(config)
    config_classes = load("transformers.models.auto.configuration_auto:CONFIG_MAPPING")
    if file is None:
        if config not in config_classes:
            raise InputError(
                f"hf:{config}: this is neither a folder with config.json nor a model type of transformers"
                f"{did_you_mean(config, config_classes)} (nothing is downloaded: download config.json first, and write"
                " hf:FOLDER)"
            )
        return config_classes[config]()
    fields = _read_fields(file)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in config_classes:
        near = did_you_mean(str(model_type), config_classes) if model_type is not None else ""
        raise InputError(
            f"{file}: model_type is {model_type!r}, which this version of transformers does not have{near};"
            " code that comes with a model is never executed"
        )
    _check(fields, file)
    try:
        loaded = config_classes[model_type].from_dict(_without_kernels(fields))
    except Exception as error:  # whatever the config's class raises about its fields
        raise InputError(f"{file}: {' '.join(str(error).split())}") from None
    layers = getattr(loaded, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise InputError(f"{file}: num_hidden_layers is {layers}: at most {_MOST_LAYERS}")
    return loaded


def _without_kernels(fields: Any) -> Any:
    """Returns a copy of the fields, at any depth, without implementations of attention and experts that may have to be
    downloaded. The model then uses the default of its class."""
    if isinstance(fields, list):
        return [_without_kernels(item) for item in fields]
    if not isinstance(fields, dict):
        return fields
    return {
        name: _without_kernels(value)
        for name, value in fields.items()
        if "_implementation" not in name or value in _IMPLEMENTATIONS_OF_TRANSFORMERS
    }


def _check(fields: dict[str, Any], file: Path) -> None:
    """Raises an `InputError` if a field has a value that transformers does not check when it reads the config."""
    architectures = fields.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        raise InputError(f"{file}: architectures is {architectures!r}: write a list with the name of a class")
    timm_model = fields.get("architecture")
    if fields.get("model_type") == "timm_wrapper" and (not isinstance(timm_model, str) or ":" in timm_model):
        raise InputError(f"{file}: architecture is {timm_model!r}: write the name of a model of timm, without a source")


def training_kind(config: Any, source: str) -> TrainingKind:
    """Returns what a model with this config is trained for: the first class in the config's `architectures`, or if it
    names none, the first of `KINDS` that has a class for this type of model. `source` is named in errors."""
    training = _find_kind(config)
    if training is None:
        raise _no_data(config, source)
    return training


def _find_kind(config: Any) -> TrainingKind | None:
    """Returns the same as `training_kind`, and None if the class is of none of the `KINDS`."""
    classes = {kind: load(f"{_TABLES}:MODEL_FOR_{table}_MAPPING_NAMES") for kind, table in KINDS.items()}
    named = _named_class(config)
    for kind, by_type in classes.items():
        names = by_type.get(config.model_type, ())
        names = (names,) if isinstance(names, str) else tuple(names)
        if names and named is None:
            return TrainingKind(kind, names[0])
        if named in names:
            return TrainingKind(kind, named)
    return None


def _named_class(config: Any) -> Any:
    """Returns the first of the config's `architectures`, or None if it has none."""
    return (getattr(config, "architectures", None) or [None])[0]


def _no_data(config: Any, source: str) -> InputError:
    named = _named_class(config)
    if named is None:
        return InputError(
            f"hf:{source}: model_type is {config.model_type}, and it has no class for"
            f" {', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]}: name a class in architectures of its config.json"
        )
    return InputError(
        f"hf:{source}: architectures is {named}, for which no data can be generated here: write a job with your own"
        f" data and with model: {{call: meshwright.zoo.huggingface:build, config: {source}}}, or name a class for"
        f" {', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]} in architectures"
    )


def _read_fields(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise InputError(f"{file}: a config has at most {_MOST_CONFIG_BYTES} bytes")
        fields = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{file}: is not a config: write a JSON object")
    return fields


def _change(config: Any, name: str, value: Any, source: str) -> None:
    if name == "experts_implementation":
        config._experts_implementation = value
    elif name == "attn_implementation":
        config._attn_implementation = value
    elif hasattr(config, name):
        setattr(config, name, value)
    else:
        raise InputError(f"model: the config of hf:{source} has no '{name}'{did_you_mean(name, config.to_dict())}")

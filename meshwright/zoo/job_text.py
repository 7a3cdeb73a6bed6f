"""`job_text`: the job file that `meshwright init` writes for the name of a model, and that `meshwright plan` plans.
Such a job plans, proves and trains as it is, on generated data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files.weights_file import has_weights
from meshwright.zoo import huggingface, image_models

GLOBAL_BATCH = 256
_LONGEST_SEQUENCE = 4096  # without --sequence, of models that allow more
_SEQUENCE = 512  # without --sequence, of models whose config has no limit, such as T5
_EXAMPLES = {"hf": "hf:llama or hf:FOLDER", "timm": "timm:resnet50", "torchvision": "torchvision:resnet50"}
_TEXT_DATA = {  # the function in text.py that makes the data of each kind
    "causal language model": "causal",
    "masked language model": "masked",
    "sequence to sequence": "sequence_to_sequence",
    "sequence classification": "classified",
}
_OWN_DATA_COMMENT = ["The data are generated: name your own data set in data.train, whose samples have the same keys."]
_PICTURES_COMMENT = [
    "The data are generated. To train on pictures: set data.root to a folder with train/<class>/*.JPEG and",
    "val/<class>/*.JPEG, and data.synthetic to false.",
]


@dataclass(frozen=True)
class ModelSections:
    """The lines of a job that depend on the model: the comment at its top, the model, its data set without `split`, the
    loss (None if the model computes it), the optimizer, and the folder of its weights (None if they are random)."""

    comment: list[str]
    model: dict[str, Any]
    data: dict[str, Any]
    loss: str | None
    optimizer: str
    weights: Path | None = None


def job_text(name: str, global_batch: int | None = None, sequence: int | None = None, image: int | None = None) -> str:
    """Returns the text of a job for the model with this name: `hf:…`, `timm:…` or `torchvision:…`. `sequence` is the
    number of tokens of a sample and `image` the width and height of a picture; None takes the model's own. Raises an
    `InputError` if there is no such model."""
    source, _, rest = name.partition(":")
    if not rest:
        raise InputError(f"{name}: write the model after the colon, such as {_EXAMPLES[source]}")
    parts = _huggingface(rest, sequence, image) if source == "hf" else _image_model(source, rest, sequence, image)
    return _write(parts, GLOBAL_BATCH if global_batch is None else global_batch)


def _huggingface(config: str, sequence: int | None, image: int | None) -> ModelSections:
    loaded = huggingface.read_config(config)
    training = huggingface.training_kind(loaded, config)
    file = huggingface.config_file(config)
    reads_text = training.kind != "image classification"
    for option, value, is_used in (("--sequence", sequence, reads_text), ("--image", image, not reads_text)):
        if value is not None and not is_used:
            raise InputError(f"{option} {value}: {training.class_name} ({training.kind}) has no such size")
    text = loaded.get_text_config()
    weights = file.parent if file and has_weights(file.parent) else None
    origin = "the weights of its folder" if weights else "random weights"
    comment = [
        f"{training.class_name} ({training.kind}), built from {file or 'the default config of ' + config} with"
        f" {origin}.",
        "The model computes its loss itself, from `labels` in its batch, so the job has no `loss`.",
    ]
    if training.kind == "image classification":
        data, more = _picture_data(loaded, image)
    elif training.kind == "speech recognition":
        data, more = _speech_data(loaded, text, sequence, config)
    else:
        data, more = _text_data(training.kind, loaded, text, sequence)
    return ModelSections(
        [*comment, *more],
        {"call": "meshwright.zoo.huggingface:build", "config": str(file or config)},
        data,
        None,
        "{call: torch.optim:AdamW, lr: 3e-4, weight_decay: 0.1, groups: no_decay}",
        weights,
    )


def _text_data(kind: str, config: Any, text: Any, sequence: int | None) -> tuple[dict[str, Any], list[str]]:
    data = {
        "call": f"meshwright.zoo.text:{_TEXT_DATA[kind]}",
        "sequence": _sequence(sequence, text),
        "vocabulary": text.vocab_size,
    }
    if kind in ("causal language model", "masked language model"):
        return data, [
            "The data are generated. To train on texts: meshwright data tokens TEXTS FOLDER --tokenizer FILE, then",
            "set data.root to FOLDER and data.synthetic to false.",
        ]
    if kind == "sequence classification":
        problem = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
        data |= {"classes": config.num_labels, "problem": problem}
    return data, _OWN_DATA_COMMENT


def _speech_data(config: Any, text: Any, sequence: int | None, source: str) -> tuple[dict[str, Any], list[str]]:
    if config.model_type != "whisper":
        raise InputError(
            f"hf:{source}: model_type is {config.model_type}, and of the models for speech recognition only whisper has"
            " generated data here: write a job with your own data"
        )
    return {
        "call": "meshwright.zoo.speech:spectrograms",
        "bands": config.num_mel_bins,
        "frames": 2 * config.max_source_positions,  # the second convolution of the encoder halves them
        "sequence": _sequence(sequence, text),
        "vocabulary": text.vocab_size,
    }, _OWN_DATA_COMMENT


def _picture_data(config: Any, image: int | None) -> tuple[dict[str, Any], list[str]]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    if image is not None and size is not None and image != size:
        raise InputError(
            f"--image {image}: image_size in the model's config is {size}: change it there, or leave --image out"
        )
    return {
        "call": "meshwright.zoo.pictures:pictures",
        "as_dict": True,
        "size": image or size or 224,
        "classes": config.num_labels,
        "channels": getattr(vision, "num_channels", 3),
    }, _PICTURES_COMMENT


def _sequence(wanted: int | None, text: Any) -> int:
    """Returns the number of tokens of a sample: `wanted`, or if it is None, what the text part of the config allows, up
    to a limit. Models with rotary positions can be trained on longer texts than their config says."""
    names = ("max_target_positions", "max_position_embeddings")
    field, most = next(((name, getattr(text, name)) for name in names if getattr(text, name, None)), ("", None))
    if wanted is None:
        return min(most or _SEQUENCE, _LONGEST_SEQUENCE)
    is_rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling"))
    if most is not None and wanted > most and not is_rotary:
        raise InputError(
            f"--sequence {wanted}: the model has {most} positions ({field} in its config): write at most {most},"
            " or change the config"
        )
    return wanted


def _image_model(source: str, name: str, sequence: int | None, image: int | None) -> ModelSections:
    if sequence is not None:
        raise InputError(f"--sequence {sequence}: {source}:{name} takes pictures: use --image")
    model = image_models.find(source, name, image)
    return ModelSections(
        [f"{name} of {source}, with random weights.", *_PICTURES_COMMENT],
        model.call,
        {"call": "meshwright.zoo.pictures:pictures", "size": model.image, "classes": model.classes},
        "{call: torch.nn.functional:cross_entropy}",
        "{call: torch.optim:AdamW, lr: 1e-3, weight_decay: 0.05, groups: no_decay}",
    )


def _write(parts: ModelSections, global_batch: int) -> str:
    weights = f", weights: {json.dumps(str(parts.weights))}" if parts.weights else ""
    data = {"train": {**parts.data, "split": "train"}, "eval": {**parts.data, "split": "val"}}
    return "\n".join(
        [
            *(f"# {line}" for line in parts.comment),
            "# docs/job.md explains all fields; --set A.B=C replaces one for a single command.",
            f"model:     {_flow(parts.model)}",
            "data:",
            f"  train:   {_flow(data['train'])}",
            f"  eval:    {_flow(data['eval'])}",
            "  root: null                # the folder of your own data",
            "  synthetic: true           # false: read the data in root",
            "  workers: 0                # loader processes of each rank",
            *([f"loss:      {parts.loss}"] if parts.loss else []),
            f"optimizer: {parts.optimizer}",
            f"train:     {{steps: 1000, global_batch: {global_batch}, clip_norm: 1.0, seed: 0{weights}}}",
            "checkpoint: {every_steps: 200, keep: 3}",
            "log:       {every_steps: 10, eval_every_steps: 200, tensorboard: true}",
            "plan: auto                  # or the file that `meshwright plan JOB --output plan.yaml` writes",
            "allow: changes              # plan: auto may compute in bf16 or fp16; rounding: only in fp32",
            "cluster: local              # all devices of this machine",
            "output: runs                # the folder of the runs",
            "",
        ]
    )


def _flow(call: dict[str, Any]) -> str:
    """Returns the mapping on one line of YAML. Strings other than import paths and plain words are quoted."""
    words = {key: value if _is_plain(value) else json.dumps(value) for key, value in call.items()}
    return "{" + ", ".join(f"{key}: {word}" for key, word in words.items()) + "}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and value.replace("_", "").replace(".", "").replace(":", "").isalpha()

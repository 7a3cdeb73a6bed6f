"""Image classifiers of timm and torchvision, found by name, with random weights and without the network."""

from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError, did_you_mean
from meshwright.user.call import load

# torchvision's models with further outputs in training mode; without them, the output is one tensor of scores.
_WITHOUT_AUXILIARY_OUTPUTS = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}
_CLASSES, _IMAGE = 1000, 224  # of ImageNet, for models that do not say


@dataclass(frozen=True)
class ImageModel:
    """A job's `model` field, the number of classes, and the width and height of the pictures."""

    call: dict[str, Any]
    classes: int
    image: int


def find(source: str, name: str, image: int | None) -> ImageModel:
    """Returns the model of `timm` or `torchvision` with this name. `image` is the width and height of the pictures;
    None takes the size that the model was published with. Raises an `InputError` if there is no such model."""
    return _find_timm(name, image) if source == "timm" else _find_torchvision(name, image)


def _find_timm(name: str, image: int | None) -> ImageModel:
    if not load("timm:is_model")(name):
        raise InputError(f"timm:{name}: there is no such model{did_you_mean(name, load('timm:list_models')())}")
    published = load("timm:get_pretrained_cfg")(name)
    size, classes = published.input_size[-1], published.num_classes or _CLASSES
    call = {"call": "timm:create_model", "model_name": name, "num_classes": classes}
    if image is not None and image != size and published.fixed_input_size:
        call["img_size"] = image  # the positions or windows of the model depend on it
    return ImageModel(call, classes, image or size)


def _find_torchvision(name: str, image: int | None) -> ImageModel:
    names = load("torchvision.models:list_models")(module=load("torchvision:models"))
    if name in load("torchvision.models:list_models")(module=load("torchvision.models:detection")):
        raise InputError(
            f"torchvision:{name}: what a detector computes depends on the boxes in its images, so it cannot be planned:"
            " write a job with your own data and a plan with the axes replicate or shard"
        )
    if name not in names:
        raise InputError(f"torchvision:{name}: there is no such image classifier{did_you_mean(name, names)}")
    weights = load("torchvision.models:get_model_weights")(name)
    published = next(iter(weights), None)
    options = getattr(getattr(published, "transforms", None), "keywords", {})
    size = options.get("crop_size", _IMAGE)
    classes = len(published.meta["categories"]) if published else _CLASSES
    call = {"call": "torchvision.models:get_model", "name": name, "num_classes": classes}
    call |= _WITHOUT_AUXILIARY_OUTPUTS.get(name, {})
    if image is not None and image != size and name.startswith("vit_"):
        call["image_size"] = image
    return ImageModel(call, classes, image or size)

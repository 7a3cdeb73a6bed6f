"""All models of the sweep by name, and the ten of its short form."""

from validation.speed.sweep.case import ModelCase
from validation.speed.sweep.models.decoders import DECODERS
from validation.speed.sweep.models.encoders import ENCODERS
from validation.speed.sweep.models.images import TIMM, TORCHVISION
from validation.speed.sweep.models.own_images import OWN_IMAGES
from validation.speed.sweep.models.own_sequences import OWN_SEQUENCES

MODELS: dict[str, ModelCase] = {
    case.name: case for case in (*TORCHVISION, *DECODERS, *ENCODERS, *OWN_IMAGES, *OWN_SEQUENCES, *TIMM)
}
TEN = (
    *("gpt2", "llama_0.6b", "bert", "vit_b_16", "convnext_t"),
    *("swin_t", "resnet50", "unet", "lstm", "deeplabv3_resnet101"),
)

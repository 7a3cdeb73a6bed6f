"""The published transformers by name: a row of published.json calls one of these functions."""

from validation.segmentation.backbones.convnext import ConvNeXt
from validation.segmentation.backbones.mit import MixTransformer, SegFormerHead
from validation.segmentation.backbones.plain_vit import LevelNeck, UpsamplingHead
from validation.segmentation.backbones.poolformer import PoolFormer
from validation.segmentation.backbones.swin import Swin
from validation.segmentation.backbones.transformer import VisionTransformer
from validation.segmentation.backbones.twins import Twins
from validation.segmentation.heads.context_heads import FCNHead
from validation.segmentation.heads.pyramid_heads import FeaturePyramid, Neck, SemanticFPNHead, UPerHead
from validation.segmentation.heads.segmenter import LinearHead, MaskHead
from validation.segmentation.segmentor import Segmentor

# Width and number of heads of plain vision transformers.
WIDTHS = {
    "tiny": (192, 3),
    "small": (384, 6),
    "base": (768, 12),
    "large": (1024, 16),
}


def segformer(kind: int, classes: int) -> Segmentor:
    backbone = MixTransformer(kind)
    return Segmentor(backbone, [SegFormerHead(backbone.widths, classes)])


def swin_upernet(kind: str, classes: int, window: int = 7) -> Segmentor:
    backbone = Swin(kind, window)
    return Segmentor(backbone, [UPerHead(backbone.widths, 512, classes), FCNHead(backbone.widths[2], 256, classes)])


def convnext_upernet(kind: str, classes: int) -> Segmentor:
    backbone = ConvNeXt(kind)
    return Segmentor(backbone, [UPerHead(backbone.widths, 512, classes), FCNHead(backbone.widths[2], 256, classes)])


def twins(kind: str, classes: int, head: str) -> Segmentor:
    """Twins with the head `fpn`, or with the head `uper` and an auxiliary FCN head."""
    backbone = Twins(kind)
    if head == "fpn":
        neck = Neck(backbone, FeaturePyramid(backbone.widths))
        return Segmentor(neck, [SemanticFPNHead(256, 128, classes)])
    return Segmentor(backbone, [UPerHead(backbone.widths, 512, classes), FCNHead(backbone.widths[2], 256, classes)])


def vit_upernet(kind: str, classes: int, size: int = 512, neck: bool = True, final_norm: bool = False) -> Segmentor:
    width, heads = WIDTHS[kind]
    backbone = VisionTransformer(width, heads, (3, 3, 3, 3), (size, size), path=0.1, final_norm=final_norm)
    whole = Neck(backbone, LevelNeck(width)) if neck else backbone
    return Segmentor(whole, [UPerHead([width] * 4, 512, classes), FCNHead(width, 256, classes, feature=3)])


def segmenter(kind: str, classes: int, size: int, masks: bool = True) -> Segmentor:
    width, heads = WIDTHS[kind]
    layers = (24,) if kind == "large" else (12,)
    backbone = VisionTransformer(width, heads, layers, (size, size), path=0.1, final_norm=True)
    return Segmentor(backbone, [MaskHead(width, heads, classes) if masks else LinearHead(width, classes)])


def setr(classes: int, size: int, progressive: bool) -> Segmentor:
    """SETR on ViT-L with dropout. Its head enlarges the map in four steps (`progressive`, PUP) or in one (naive)."""
    width, heads = WIDTHS["large"]
    backbone = VisionTransformer(width, heads, (10, 5, 5, 4), (size, size), drop=0.1)
    kernel = 3 if progressive else 1
    main = UpsamplingHead(width, classes, 3, 4 if progressive else 1, 2 if progressive else 4, kernel)
    return Segmentor(backbone, [main, *(UpsamplingHead(width, classes, level, 1, 4, kernel) for level in range(3))])


def poolformer(kind: str, classes: int) -> Segmentor:
    backbone = PoolFormer(kind)
    neck = Neck(backbone, FeaturePyramid(backbone.widths))
    return Segmentor(neck, [SemanticFPNHead(256, 128, classes)])

"""The published convolutional models by name: a row of published.json calls one of these functions."""

from collections.abc import Callable, Sequence

from torch import nn

from validation.segmentation.backbones.bisenet import BiSeNet
from validation.segmentation.backbones.hrnet import HRNet, Joined
from validation.segmentation.backbones.mobilenet import MobileNetV2
from validation.segmentation.backbones.resnest import ResNeSt
from validation.segmentation.backbones.resnet import ResNet
from validation.segmentation.backbones.unet import UNet
from validation.segmentation.heads import attention_heads as attention
from validation.segmentation.heads import context_heads as context
from validation.segmentation.heads import cuda_operators as cuda
from validation.segmentation.heads import pooled_heads as pooled
from validation.segmentation.heads import pyramid_heads as pyramid
from validation.segmentation.heads.joint_upsampling import JointUpsampling
from validation.segmentation.heads.ocr import First, ObjectContextHead
from validation.segmentation.segmentor import Segmentor

MakeHead = Callable[[Sequence[int], int, int], nn.Module]

HEADS: dict[str, MakeHead] = {
    "fcn": lambda w, c, k: context.FCNHead(w[3], c, k, convs=2, concat=True, feature=3),
    "psp": lambda w, c, k: context.PSPHead(w[3], c, k),
    "aspp": lambda w, c, k: context.ASPPHead(w[3], c, k),
    "separable_aspp": lambda w, c, k: context.SeparableASPPHead(w[3], c, k, w[0], 48 if c == 512 else 12),
    "nonlocal": lambda w, c, k: attention.ContextHead(w[3], c, k, attention.NonLocal(c)),
    "disentangled": lambda w, c, k: attention.ContextHead(w[3], c, k, attention.NonLocal(c, True)),
    "global_context": lambda w, c, k: attention.ContextHead(w[3], c, k, attention.GlobalContext(c)),
    "interlaced": lambda w, c, k: attention.InterlacedHead(w[3], c, k),
    "dual": lambda w, c, k: attention.DualHead(w[3], c, k),
    "asymmetric": lambda w, c, k: attention.AsymmetricHead(w[2], w[3], c, k),
    "adaptive": lambda w, c, k: pooled.SideBySideHead(w[3], c, k, dynamic=False),
    "dynamic": lambda w, c, k: pooled.SideBySideHead(w[3], c, k, dynamic=True),
    "encoding": lambda w, c, k: pooled.EncodingHead(w[3], c, k),
    "criss_cross": lambda w, c, k: cuda.criss_cross_head(w[3], c, k),
    "pointwise": lambda w, c, k: cuda.PointwiseHead(w[3], c, k),
    "uper": pyramid.UPerHead,
}


def resnet(
    head: str,
    classes: int,
    depth: int = 50,
    output_stride: int = 8,
    deep_stem: bool = True,
    dilation: int = 1,
    recent: bool = False,
) -> Segmentor:
    """A head on a ResNet, with an auxiliary FCN head on its third stage; `dilation` is that of the FCN heads."""
    backbone = ResNet(depth, output_stride, deep_stem)
    narrow = depth < 50
    main = HEADS[head](backbone.widths, 128 if narrow else 512, classes)
    if dilation > 1:
        main = context.FCNHead(backbone.widths[3], 512, classes, 2, True, 3, dilation=dilation)
    auxiliary = context.FCNHead(backbone.widths[2], 64 if narrow else 256, classes, dilation=dilation)
    return Segmentor(backbone, [main, auxiliary], recent)


def semantic_fpn(classes: int, depth: int = 50) -> Segmentor:
    backbone = ResNet(depth, 32)
    neck = pyramid.FeaturePyramid(backbone.widths)
    return Segmentor(pyramid.Neck(backbone, neck), [pyramid.SemanticFPNHead(256, 128, classes)])


def hrnet(classes: int, width: int = 18, small: bool = False) -> Segmentor:
    backbone = HRNet(width, small)
    wide = sum(backbone.widths)
    head = context.FCNHead(wide, wide, classes, feature=0, kernel=1, dropout=0.0)
    return Segmentor(backbone, [Joined(head)])


def hrnet_ocr(classes: int, width: int = 18, small: bool = False) -> Segmentor:
    backbone = HRNet(width, small)
    wide = sum(backbone.widths)
    coarse = context.FCNHead(wide, wide, classes, feature=0, kernel=1, dropout=0.0)
    second = ObjectContextHead(coarse, wide, classes)
    return Segmentor(backbone, [First(second), second])


def resnet_ocr(classes: int, depth: int = 101) -> Segmentor:
    backbone = ResNet(depth)
    coarse = context.FCNHead(backbone.widths[2], 256, classes)
    second = ObjectContextHead(coarse, backbone.widths[3], classes, join=False)
    return Segmentor(backbone, [First(second), second])


def fast_fcn(head: str, classes: int) -> Segmentor:
    """A head on the features that joint upsampling computes from the last three stages of a ResNet."""
    backbone = ResNet(50, 32)
    main = HEADS[head]([0, 0, 0, 2048], 512, classes)
    auxiliary = context.FCNHead(backbone.widths[2], 256, classes)
    return Segmentor(pyramid.Neck(backbone, JointUpsampling(backbone.widths[1:])), [main, auxiliary])


def resnest(head: str, classes: int) -> Segmentor:
    backbone = ResNeSt()
    main = HEADS[head](backbone.widths, 512, classes)
    return Segmentor(backbone, [main, context.FCNHead(backbone.widths[2], 256, classes)])


def bisenet_v1(classes: int, depth: int = 18) -> Segmentor:
    """BiSeNetV1 with two auxiliary heads on its context path."""
    backbone = BiSeNet(depth)
    fused, wide, _ = backbone.widths
    auxiliary = (context.FCNHead(wide, wide // 2, classes, feature=feature) for feature in (1, 2))
    return Segmentor(backbone, [context.FCNHead(fused, fused, classes, feature=0), *auxiliary])


def mobilenet_v2(head: str, classes: int) -> Segmentor:
    backbone = MobileNetV2()
    main = HEADS[head](backbone.widths, 512, classes)
    return Segmentor(backbone, [main, context.FCNHead(backbone.widths[2], 256, classes)])


def unet(head: str, classes: int, dice: bool = False) -> Segmentor:
    """A head on the finest features of a UNet, and an auxiliary head on the next coarser ones."""
    main: dict[str, Callable[[], nn.Module]] = {
        "fcn": lambda: context.FCNHead(64, 64, classes, feature=4),
        "psp": lambda: context.PSPHead(64, 16, classes, feature=4),
        "aspp": lambda: context.ASPPHead(64, 16, classes, feature=4),
    }
    return Segmentor(UNet(), [main[head](), context.FCNHead(128, 64, classes, feature=3)], dice=dice)

"""ResNets for segmentation: dilation replaces the strides of the last stages (D8, D16), or not (D32)."""

from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
STRIDES = {8: (1, 2, 1, 1), 16: (1, 2, 2, 1), 32: (1, 2, 2, 2)}
DILATIONS = {8: (1, 1, 2, 4), 16: (1, 1, 1, 2), 32: (1, 1, 1, 1)}


class Residual(nn.Module):
    """`relu(path(x) + shortcut(x))`; the sum and the ReLU are in place."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.path(x)
        out += self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


def bottleneck(inputs: int, width: int, stride: int, dilation: int) -> Residual:
    outputs = 4 * width
    path = nn.Sequential(
        ConvNorm(inputs, width),
        ConvNorm(width, width, 3, stride, dilation),
        ConvNorm(width, outputs, activation=False),
    )
    return Residual(path, _shortcut(inputs, outputs, stride))


def basic(inputs: int, width: int, stride: int, dilation: int) -> Residual:
    path = nn.Sequential(
        ConvNorm(inputs, width, 3, stride, dilation), ConvNorm(width, width, 3, 1, dilation, activation=False)
    )
    return Residual(path, _shortcut(inputs, width, stride))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return ConvNorm(inputs, outputs, 1, stride, activation=False)


class ResNet(nn.Module):
    """Returns the features of its four stages. `deep_stem` (ResNetV1c) replaces the 7×7 convolution by three of 3×3."""

    def __init__(self, depth: int = 50, output_stride: int = 8, deep_stem: bool = True) -> None:
        super().__init__()
        stem = (
            [ConvNorm(3, 32, 3, 2), ConvNorm(32, 32, 3), ConvNorm(32, 64, 3)] if deep_stem else [ConvNorm(3, 64, 7, 2)]
        )
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        block, expansion = (basic, 1) if depth < 50 else (bottleneck, 4)
        self.stages = nn.ModuleList()
        inputs = 64
        settings = zip(
            BLOCKS[depth], STRIDES[output_stride], DILATIONS[output_stride], (64, 128, 256, 512), strict=True
        )
        for count, stride, dilation, width in settings:
            first = block(inputs, width, stride, max(1, dilation // 2))
            inputs = width * expansion
            self.stages.append(nn.Sequential(first, *(block(inputs, width, 1, dilation) for _ in range(count - 1))))
        self.widths = [width * expansion for width in (64, 128, 256, 512)]

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features

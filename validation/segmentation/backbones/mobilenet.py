"""MobileNetV2 that keeps its resolution after the third stage (D8): inverted residuals with depthwise convolutions."""

from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm

# Expansion, width, blocks, stride and dilation of the seven stages.
STAGES = (
    (1, 16, 1, 1, 1),
    (6, 24, 2, 2, 1),
    (6, 32, 3, 2, 1),
    (6, 64, 4, 1, 2),
    (6, 96, 3, 1, 2),
    (6, 160, 3, 1, 4),
    (6, 320, 1, 1, 4),
)
RETURNED_STAGES = (1, 2, 4, 6)


# MobileNetV2's ReLU6 is a ReLU here: in place, both saved only their result, while today's ReLU6 saves a copy of its
# input.
_conv = ConvNorm


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, dilation: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.path = nn.Sequential(
            *([_conv(inputs, wide)] if expansion > 1 else []),
            _conv(wide, wide, 3, stride, dilation, groups=wide),
            ConvNorm(wide, outputs, activation=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.path(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """Returns the features of its second, third, fifth and last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 32, 3, 2)
        self.stages = nn.ModuleList()
        inputs = 32
        for expansion, width, blocks, stride, dilation in STAGES:
            layers = []
            for number in range(blocks):
                layers.append(InvertedResidual(inputs, width, expansion, stride if number == 0 else 1, dilation))
                inputs = width
            self.stages.append(nn.Sequential(*layers))
        self.widths = [STAGES[stage][1] for stage in RETURNED_STAGES]

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.stem(images)
        features = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in RETURNED_STAGES:
                features.append(x)
        return features

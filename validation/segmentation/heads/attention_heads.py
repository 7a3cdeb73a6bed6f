"""Heads in which every position of a map attends to others: Non-local, GCNet, DNL, ISANet, DANet and ANN."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.era import softmax
from validation.segmentation.heads.context_heads import Classifier
from validation.segmentation.layers import ConvNorm


class ContextHead(nn.Module):
    """Two convolutions with a context block between them, and a third on the concatenation of their output and the
    input."""

    def __init__(self, inputs: int, channels: int, classes: int, block: nn.Module) -> None:
        super().__init__()
        self.before = ConvNorm(inputs, channels, 3)
        self.block = block
        self.after = ConvNorm(channels, channels, 3)
        self.joined = ConvNorm(inputs + channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[3]
        out = self.after(self.block(self.before(x)))
        scores: Tensor = self.classifier(self.joined(torch.cat([x, out], 1)))
        return scores


class NonLocal(nn.Module):
    """Every position receives a weighted sum over all positions. `disentangled` (DNL) subtracts the means of queries
    and keys, and adds a sum whose weights are the same for every position."""

    def __init__(self, channels: int, disentangled: bool = False) -> None:
        super().__init__()
        half = channels // 2
        self.value = nn.Conv2d(channels, half, 1)
        self.query = nn.Conv2d(channels, half, 1)
        self.key = nn.Conv2d(channels, half, 1)
        self.out = ConvNorm(half, channels, activation=False)
        self.mask = nn.Conv2d(channels, 1, 1) if disentangled else None

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x).flatten(2).permute(0, 2, 1)
        query = self.query(x).flatten(2).permute(0, 2, 1)
        key = self.key(x).flatten(2)
        if self.mask is not None:
            query -= query.mean(dim=-2, keepdim=True)
            key -= key.mean(dim=-1, keepdim=True)
        weights = torch.matmul(query, key)
        weights /= query.shape[-1] ** 0.5
        if self.mask is not None:
            weights /= 0.05
        attended = torch.matmul(softmax(weights, -1), value)
        attended = attended.permute(0, 2, 1).contiguous().reshape(x.shape[0], -1, *x.shape[2:])
        if self.mask is not None:
            shared_weights = softmax(self.mask(x).flatten(2), -1)
            attended = attended + torch.matmul(shared_weights, value).permute(0, 2, 1).unsqueeze(-1)
        return x + self.out(attended)


class GlobalContext(nn.Module):
    """One weighted sum over all positions, added to each of them through a small bottleneck."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.mask = nn.Conv2d(channels, 1, 1)
        self.transform = nn.Sequential(
            nn.Conv2d(channels, quarter, 1),
            nn.LayerNorm([quarter, 1, 1]),
            nn.ReLU(inplace=True),
            nn.Conv2d(quarter, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = softmax(self.mask(x).flatten(2), 2)
        context = torch.matmul(x.flatten(2).unsqueeze(1), weights.unsqueeze(-1))
        added: Tensor = self.transform(context.reshape(x.shape[0], -1, 1, 1))
        return x + added


class SelfAttention(nn.Module):
    """Attention between the positions of two maps. Queries and keys go through `depth` convolutions with norm and ReLU.
    With `pooled`, keys and values are means over grids with these numbers of cells per side."""

    def __init__(
        self,
        query_inputs: int,
        key_inputs: int,
        channels: int,
        outputs: int,
        depth: int = 2,
        shared: bool = False,
        normed_values: bool = True,
        pooled: Sequence[int] = (),
        project: bool = True,
    ) -> None:
        super().__init__()
        self.query = _projection(query_inputs, channels, depth)
        self.key = self.query if shared else _projection(key_inputs, channels, depth)
        value = channels if project else outputs
        self.value = ConvNorm(key_inputs, value) if normed_values else nn.Conv2d(key_inputs, value, 1)
        self.out = ConvNorm(value, outputs) if project else nn.Identity()
        self.pooled = nn.ModuleList(nn.AdaptiveAvgPool2d(side) for side in pooled)
        self.scale = channels**-0.5

    def _flat(self, x: Tensor) -> Tensor:
        return torch.cat([pool(x).flatten(2) for pool in self.pooled], 2) if len(self.pooled) else x.flatten(2)

    def forward(self, query_map: Tensor, key_map: Tensor) -> Tensor:
        count, _, height, width = query_map.shape
        query = self.query(query_map).flatten(2).permute(0, 2, 1).contiguous()
        key = self._flat(self.key(key_map))
        value = self._flat(self.value(key_map)).permute(0, 2, 1).contiguous()
        weights = softmax(torch.matmul(query, key) * self.scale, -1)
        attended = torch.matmul(weights, value).permute(0, 2, 1).contiguous()
        result: Tensor = self.out(attended.reshape(count, -1, height, width))
        return result


def _projection(inputs: int, channels: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(ConvNorm(inputs if n == 0 else channels, channels) for n in range(depth)))


class InterlacedHead(nn.Module):
    """ISANet: attention among distant positions (the same position of every cell), then within each cell of 8×8."""

    def __init__(self, inputs: int, channels: int, classes: int, inner: int = 256, cells: int = 8) -> None:
        super().__init__()
        self.cells = cells
        self.before = ConvNorm(inputs, channels, 3)
        self.far = SelfAttention(channels, channels, inner, channels)
        self.near = SelfAttention(channels, channels, inner, channels)
        self.joined = ConvNorm(2 * channels, channels)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = self.before(features[3])
        first = x
        count, channels, height, width = x.shape
        side = self.cells
        rows, columns = -(-height // side), -(-width // side)
        more_h, more_w = rows * side - height, columns * side - width
        if more_h or more_w:
            x = F.pad(x, (more_w // 2, more_w - more_w // 2, more_h // 2, more_h - more_h // 2))
        x = x.view(count, channels, rows, side, columns, side)
        x = x.permute(0, 3, 5, 1, 2, 4).reshape(-1, channels, rows, columns)
        x = self.far(x, x)
        x = x.view(count, side, side, channels, rows, columns)
        x = x.permute(0, 4, 5, 3, 1, 2).reshape(-1, channels, side, side)
        x = self.near(x, x)
        x = x.view(count, rows, columns, channels, side, side)
        x = x.permute(0, 3, 1, 4, 2, 5).reshape(count, channels, rows * side, columns * side)
        if more_h or more_w:
            x = x[:, :, more_h // 2 : more_h // 2 + height, more_w // 2 : more_w // 2 + width]
        scores: Tensor = self.classifier(self.joined(torch.cat([x, first], 1)))
        return scores


class DualHead(nn.Module):
    """DANet: attention among positions and attention among channels. Both, and their sum, have scores and a loss."""

    def __init__(self, inputs: int, channels: int, classes: int, inner: int = 64) -> None:
        super().__init__()
        self.positions_before = ConvNorm(inputs, channels, 3)
        self.query = nn.Conv2d(channels, inner, 1)
        self.key = nn.Conv2d(channels, inner, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.positions_scale = nn.Parameter(torch.zeros(1))
        self.positions_after = ConvNorm(channels, channels, 3)
        self.positions_classifier = Classifier(channels, classes)
        self.channels_before = ConvNorm(inputs, channels, 3)
        self.channels_scale = nn.Parameter(torch.zeros(1))
        self.channels_after = ConvNorm(channels, channels, 3)
        self.channels_classifier = Classifier(channels, classes)
        self.classifier = Classifier(channels, classes)

    def _positions(self, x: Tensor) -> Tensor:
        query = self.query(x).flatten(2).permute(0, 2, 1).contiguous()
        weights = softmax(torch.matmul(query, self.key(x).flatten(2)), -1)
        value = self.value(x).flatten(2).permute(0, 2, 1).contiguous()
        attended = torch.matmul(weights, value).permute(0, 2, 1).contiguous().reshape(x.shape)
        return self.positions_scale * attended + x

    def _channels(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        energy = torch.bmm(flat, flat.permute(0, 2, 1))
        energy = energy.max(-1, keepdim=True)[0].expand_as(energy) - energy
        attended = torch.bmm(softmax(energy, -1), flat).view(x.shape)
        return self.channels_scale * attended + x

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        positions = self.positions_after(self._positions(self.positions_before(features[3])))
        positions_scores = self.positions_classifier(positions)
        channels = self.channels_after(self._channels(self.channels_before(features[3])))
        channels_scores = self.channels_classifier(channels)
        return [self.classifier(positions + channels), positions_scores, channels_scores]


class AsymmetricHead(nn.Module):
    """ANN: attention with pooled keys and values fuses the last two stages, and then refines the result by
    self-attention."""

    def __init__(self, low: int, inputs: int, channels: int, classes: int, inner: int = 256) -> None:
        super().__init__()
        scales = (1, 3, 6, 8)
        self.fusion = SelfAttention(inputs, low, inner, inputs, 1, normed_values=False, pooled=scales, project=False)
        self.fused = ConvNorm(inputs + inputs, inputs, activation=False)
        self.drop = nn.Dropout2d(0.1)
        self.bottleneck = ConvNorm(inputs, channels, 3)
        self.context = SelfAttention(
            channels, channels, inner, channels, 1, True, normed_values=False, pooled=scales, project=False
        )
        self.contexted = ConvNorm(2 * channels, channels)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        low, high = features[2], features[3]
        fused = self.fused(torch.cat([self.fusion(high, low), high], 1))
        out = self.bottleneck(self.drop(fused))
        out = self.contexted(torch.cat([self.context(out, out), out], 1))
        scores: Tensor = self.classifier(out)
        return scores

"""Published models that no library at hand builds as they were run: BERT with the heads of its two kinds of training,
and SSD on ResNet-50. Shapes and operators are those of NVIDIA's DeepLearningExamples."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, cat, nn, zeros

from meshwright.call import load

CLASSES = 81  # of COCO, with the background
ANCHORS = (4, 6, 6, 6, 4, 4)
FEATURES = (1024, 512, 512, 256, 256, 256)
BETWEEN = (256, 256, 128, 128, 128)


class Bert(nn.Module):
    """Pre-training predicts the words at `targets` places; fine-tuning on SQuAD the begin and the end of a span."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        task: Literal["words", "spans"],
        targets: int = 0,
        attention: Literal["eager", "sdpa"] = "eager",
    ) -> None:
        super().__init__()
        config = load("transformers.BertConfig")(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            vocab_size=vocabulary,
            attn_implementation=attention,
        )
        self.targets = targets
        self.masked = attention == "eager"  # which adds it to the scores, as NVIDIA's program does
        self.bert = load("transformers.BertModel")(config, add_pooling_layer=False)
        self.head = _words_head(hidden, vocabulary) if task == "words" else nn.Linear(hidden, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = zeros((len(tokens), 1, 1, tokens.shape[1]), device=tokens.device) if self.masked else None
        hidden = self.bert(tokens, attention_mask=mask).last_hidden_state
        scores: Tensor = self.head(hidden[:, : self.targets] if self.targets else hidden)
        return scores


def _words_head(hidden: int, vocabulary: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary))


def words_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1).float(), target.flatten())


def spans_loss(scores: Tensor, target: Tensor) -> Tensor:
    """The begin and the end are each one of the places."""
    return F.cross_entropy(scores.float(), target)


def masks_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


class SSD(nn.Module):
    """SSD300: ResNet-50 up to its third stage, which keeps the resolution, and six maps of boxes."""

    def __init__(self) -> None:
        super().__init__()
        resnet: Any = load("torchvision.models.resnet50")(weights=None)
        first = resnet.layer3[0]
        for layer in (first.conv1, first.conv2, first.downsample[0]):
            layer.stride = (1, 1)
        self.backbone = nn.Sequential(
            resnet.conv1,
            resnet.bn1,
            resnet.relu,
            resnet.maxpool,
            resnet.layer1,
            resnet.layer2,
            resnet.layer3,
        )
        self.smaller = nn.ModuleList(
            _smaller(FEATURES[n], BETWEEN[n], FEATURES[n + 1], halves=n < 3) for n in range(len(BETWEEN))
        )
        self.boxes = nn.ModuleList(
            nn.Conv2d(features, anchors * (4 + CLASSES), 3, padding=1)
            for features, anchors in zip(FEATURES, ANCHORS, strict=True)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.backbone(images)
        maps = [x]
        for block in self.smaller:
            x = block(x)
            maps.append(x)
        found = [head(x).unflatten(1, (4 + CLASSES, -1)).flatten(2) for head, x in zip(self.boxes, maps, strict=True)]
        return cat(found, dim=-1)


def _smaller(features: int, between: int, out: int, halves: bool) -> nn.Module:
    second = nn.Conv2d(between, out, 3, 2 if halves else 1, 1 if halves else 0, bias=False)
    return nn.Sequential(
        nn.Conv2d(features, between, 1, bias=False),
        nn.BatchNorm2d(between),
        nn.ReLU(inplace=True),
        second,
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


def boxes_loss(found: Tensor, target: Tensor) -> Tensor:
    """Without the choice of hard negatives, which is little work and depends on the data."""
    classes = F.cross_entropy(found[:, 4:].float(), target[:, 0].long())
    return classes + F.smooth_l1_loss(found[:, :4].float(), target[:, 1:])

"""Published models that no installed library builds as they were run: BERT with its heads for pre-training and for
fine-tuning, and SSD on ResNet-50. Shapes and operators are those of NVIDIA's DeepLearningExamples."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, cat, nn, zeros

from meshwright.user.call import load

CLASSES = 81  # the classes of COCO and the background
ANCHORS = (4, 6, 6, 6, 4, 4)
FEATURES = (1024, 512, 512, 256, 256, 256)
INNER_FEATURES = (256, 256, 128, 128, 128)


class Bert(nn.Module):
    """With the task `words` (pre-training) it predicts the words at the first `targets` positions; with `spans`
    (fine-tuning on SQuAD), the begin and the end of a span."""

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
        self.masked = attention == "eager"  # eager attention adds a mask to the scores, as NVIDIA's program does
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
    """Cross entropy of the begin and of the end, each of which is one of the positions."""
    return F.cross_entropy(scores.float(), target)


def masks_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


class SSD(nn.Module):
    """SSD300: a ResNet-50 up to its third stage, in which the stride is removed, and six feature maps that predict
    boxes."""

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
            _smaller(FEATURES[n], INNER_FEATURES[n], FEATURES[n + 1], halves=n < 3) for n in range(len(INNER_FEATURES))
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
        boxes = [head(x).unflatten(1, (4 + CLASSES, -1)).flatten(2) for head, x in zip(self.boxes, maps, strict=True)]
        return cat(boxes, dim=-1)


def _smaller(features: int, inner: int, out: int, halves: bool) -> nn.Module:
    """The layers that make the next smaller feature map: by a stride of 2 if `halves`, else without padding."""
    second = nn.Conv2d(inner, out, 3, 2 if halves else 1, 1 if halves else 0, bias=False)
    return nn.Sequential(
        nn.Conv2d(features, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU(inplace=True),
        second,
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


def boxes_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of classes and coordinates. The choice of hard negatives is left out: it is little work, and depends on
    the data."""
    classes = F.cross_entropy(output[:, 4:].float(), target[:, 0].long())
    return classes + F.smooth_l1_loss(output[:, :4].float(), target[:, 1:])

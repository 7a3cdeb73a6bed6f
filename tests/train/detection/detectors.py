"""Detectors of torchvision that are small enough for tests, and pictures of different sizes with boxes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.user.call import load

_kernels: list[Any] = []  # torch drops a kernel when the last reference to its library is gone
ALL = 10**6  # anchors or proposals that are drawn from a picture: all of them, so that nothing depends on chance


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in plain torch, for a torchvision without its compiled operators."""
    from torchvision.ops import box_iou

    overlaps = box_iou(boxes, boxes) > threshold
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not overlaps[index, kept].any():
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def align(features: Tensor, boxes: Any, output_size: Any, spatial_scale: float = 1.0, *_: Any, **__: Any) -> Tensor:
    """Takes the same arguments as torchvision's roi_align, which compiles itself where its compiled operator is
    missing. This takes seconds, so the features of a box are interpolated at the places of a grid instead."""
    if not isinstance(boxes, Tensor):
        boxes = torch.cat([torch.cat([torch.full_like(b[:, :1], n), b], 1) for n, b in enumerate(boxes)])
    rows, columns = (output_size, output_size) if isinstance(output_size, int) else output_size
    height, width = features.shape[-2:]
    left, top, right, bottom = (boxes[:, 1:] * spatial_scale).unbind(1)
    steps_y = torch.linspace(0, 1, rows, dtype=boxes.dtype)
    steps_x = torch.linspace(0, 1, columns, dtype=boxes.dtype)
    y = (top[:, None] + (bottom - top)[:, None] * steps_y) / height * 2 - 1
    x = (left[:, None] + (right - left)[:, None] * steps_x) / width * 2 - 1
    grid = torch.stack([x[:, None, :].expand(-1, rows, -1), y[:, :, None].expand(-1, -1, columns)], -1)
    return F.grid_sample(features[boxes[:, 0].long()], grid.to(features.dtype), align_corners=False)


def import_detection() -> Any:
    """Returns torchvision's module of detectors. Where its compiled operators are missing, those above are used."""
    detection = load("torchvision.models:detection")
    if not load("torchvision:extension")._has_ops() and not _kernels:
        kernels = torch.library.Library("torchvision", "IMPL")
        kernels.impl("nms", suppress, "CPU")
        _kernels.append(kernels)
        load("torchvision.ops:boxes")._assert_has_ops = lambda: None
        load("torchvision.ops:poolers").roi_align = align
        detection.roi_heads.roi_align = align
    return detection


class Backbone(nn.Sequential):
    """Features of an eighth of the picture's width and height."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__(nn.Conv2d(3, channels, 3, 4, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU())
        self.out_channels = channels


def detector(kind: str) -> nn.Module:
    """Returns a detector with three classes, the same for the same `kind`: faster_rcnn, mask_rcnn, keypoint_rcnn,
    retinanet, ssd or fcos."""
    detection = import_detection()
    anchors = detection.rpn.AnchorGenerator(((16, 32),), ((1.0,),))
    size = {"min_size": 48, "max_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind.endswith("rcnn"):
            pool = load("torchvision.ops:MultiScaleRoIAlign")(["0"], 4, 2)
            drawn = {"rpn_batch_size_per_image": ALL, "box_batch_size_per_image": ALL}
            more = {
                "faster_rcnn": {},
                "mask_rcnn": {"mask_roi_pool": pool, "mask_head": detection.mask_rcnn.MaskRCNNHeads(8, (8,), 1)},
                "keypoint_rcnn": {
                    "keypoint_roi_pool": pool,
                    "keypoint_head": detection.keypoint_rcnn.KeypointRCNNHeads(8, (8,)),
                    "keypoint_predictor": detection.keypoint_rcnn.KeypointRCNNPredictor(8, 2),
                },
            }[kind]
            if kind == "mask_rcnn":
                more["mask_predictor"] = detection.mask_rcnn.MaskRCNNPredictor(8, 8, 3)
            make = {"faster_rcnn": "FasterRCNN", "mask_rcnn": "MaskRCNN", "keypoint_rcnn": "KeypointRCNN"}[kind]
            return getattr(detection, make)(
                Backbone(),
                None,
                rpn_anchor_generator=anchors,
                box_roi_pool=pool,
                box_head=detection.faster_rcnn.TwoMLPHead(8 * 16, 16),
                box_predictor=detection.faster_rcnn.FastRCNNPredictor(16, 3),
                rpn_pre_nms_top_n_train=40,
                rpn_post_nms_top_n_train=20,
                **size,
                **drawn,
                **more,
            )
        if kind == "retinanet":
            return detection.RetinaNet(Backbone(), 3, anchor_generator=anchors, **size)
        if kind == "fcos":
            one = detection.rpn.AnchorGenerator(((8,),), ((1.0,),))
            return detection.FCOS(Backbone(32), 3, anchor_generator=one, **size)
        boxes = detection.anchor_utils.DefaultBoxGenerator([[2]], scales=[0.3, 0.6])
        return detection.ssd.SSD(Backbone(), boxes, (48, 48), 3, head=detection.ssd.SSDHead([8], [4], 3))


class Pictures(Dataset[Any]):
    """Pictures of different sizes. Picture k has k % 3 boxes more than the first; each third one has none."""

    def __init__(self, size: int = 7, keypoints: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.size = size
        self.keypoints = keypoints
        self.dtype = dtype

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        height, width = 40 + 4 * (index % 3), 44 + 6 * (index % 2)
        count = (2 + index) % 3 if not self.keypoints else 1 + index % 2
        corner = torch.rand(count, 2, generator=generator, dtype=self.dtype) * 20
        boxes = torch.cat([corner, corner + 12 + 6 * torch.rand(count, 2, generator=generator, dtype=self.dtype)], 1)
        target = {
            "boxes": boxes,
            "labels": torch.arange(count) % 2 + 1,
            "masks": (torch.rand(count, height, width, generator=generator) > 0.5).to(torch.uint8),
        }
        if self.keypoints:
            visible = (torch.arange(2 * count).reshape(count, 2, 1) + index) % 3 > 0
            points = boxes.reshape(count, 2, 2).mean(1, keepdim=True).expand(count, 2, 2)
            target["keypoints"] = torch.cat([points, visible.to(self.dtype)], 2)
        return torch.rand(3, height, width, generator=generator, dtype=self.dtype), target


def collate(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))

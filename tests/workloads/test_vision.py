"""torchvision's models as jobs name them, losses and metrics, and generated pictures."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.train.loss.loss import classify_loss
from meshwright.train.metrics import MetricTotals
from meshwright.workloads import vision

META = torch.device("meta")


def on_meta(make: Any, **keywords: Any) -> nn.Module:
    with META:
        model: nn.Module = make(**keywords)
    return model


# ---- models


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (vision.vgg16, 138.357544),
        (vision.vgg19, 143.667240),
        (vision.resnet18, 11.689512),
        (vision.resnet50, 25.557032),
    ],
)
def test_classifiers_have_torchvisions_number_of_parameters(make: Any, millions: float) -> None:
    assert sum(p.numel() for p in on_meta(make).parameters()) == round(millions * 1e6)
    few = on_meta(make, classes=7)
    assert few(torch.empty(2, 3, 32, 32, device=META)).shape == (2, 7)


def test_vggs_fully_connected_layers_may_be_narrower() -> None:
    narrow = on_meta(vision.vgg16, classes=7, hidden=32)
    wide = on_meta(vision.vgg16, classes=7)
    assert narrow(torch.empty(2, 3, 32, 32, device=META)).shape == (2, 7)
    assert list(narrow.state_dict()) == list(wide.state_dict())
    assert narrow.get_parameter("classifier.3.weight").shape == (32, 32)
    with pytest.raises(InputError, match="hidden is 0"):
        vision.vgg16(hidden=0)


@pytest.mark.soak
def test_deeplab_returns_a_score_per_class_and_pixel() -> None:
    model = on_meta(vision.deeplab)
    assert model(torch.empty(2, 3, 64, 48, device=META)).shape == (2, 21, 64, 48)


@pytest.mark.soak
def test_deeplabs_auxiliary_head_runs_in_training_only() -> None:
    model = on_meta(vision.deeplab, auxiliary=True)
    assert sum(p.numel() for p in model.parameters()) == 60_996_202  # as torchvision publishes
    images = torch.empty(2, 3, 64, 64, device=META)
    scores, auxiliary = model(images)
    assert scores.shape == auxiliary.shape == (2, 21, 64, 64)
    assert model.eval()(images).shape == (2, 21, 64, 64)


@pytest.mark.soak
def test_zero_init_residual_sets_the_last_norms_of_deeplabs_blocks_to_zero() -> None:
    from meshwright.parallel.weights.initialize import initialize_model

    def make() -> nn.Module:
        return vision.deeplab(zero_init_residual=True)

    initial = initialize_model(make, seed=0).state_dict()
    last = [name for name in initial if name.endswith("bn3.weight")]
    assert len(last) == 33
    assert not any(initial[name].any() for name in last)
    assert initial["backbone.bn1.weight"].all()


def test_deeplabs_weights_have_torchvisions_names() -> None:
    names = set(on_meta(vision.deeplab).state_dict())
    assert {"backbone.conv1.weight", "classifier.4.bias"} <= names
    assert not [name for name in names if name.startswith("aux")]


# ---- losses and metrics


def test_the_auxiliary_loss_is_added_and_ignored_pixels_do_not_count() -> None:
    scores, auxiliary, target = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 4, 4), torch.randint(5, (2, 4, 4))
    target[0] = 255
    loss, plain = vision.SegmentationLoss(auxiliary_weight=0.5), nn.CrossEntropyLoss(ignore_index=255)
    assert torch.allclose(loss(scores, target), plain(scores, target))
    assert torch.allclose(loss((scores, auxiliary), target), plain(scores, target) + 0.5 * plain(auxiliary, target))
    known = classify_loss(loss)
    assert (known.kind, int(known.count(target, 2))) == ("targets", 16)


def test_mean_iou_of_a_small_picture() -> None:
    # Class 0 has 2 pixels in the intersection and 4 in the union, class 1 has 1 and 4. Class 2 occurs once and is never
    # predicted. Class 3 does not occur.
    truth = torch.tensor([[[0, 0, 0, 1], [1, 2, 255, 255]]])
    guess = torch.tensor([[[0, 0, 1, 1], [0, 1, 0, 3]]])
    metric = vision.MeanIoU(classes=4)
    scores = nn.functional.one_hot(guess, 4).permute(0, 3, 1, 2).float()
    expected = (2 / 4 + 1 / 4 + 0) / 3
    assert metric.finish(metric(scores, truth).double()) == pytest.approx(expected)
    right, counted = vision.pixel_accuracy(scores, truth)
    assert (int(right), int(counted)) == (3, 6)


def test_mean_iou_is_computed_over_all_batches() -> None:
    scores, truth = torch.randn(6, 3, 5, 5), torch.randint(3, (6, 5, 5))
    metric = vision.MeanIoU(classes=3)
    totals = MetricTotals({"mean_iou": metric}, torch.device("cpu"))
    for part in (slice(0, 1), slice(1, 6)):
        totals.add(scores[part], truth[part], 1)
    assert totals.finish(totals.totals())["mean_iou"] == pytest.approx(metric.finish(metric(scores, truth).double()))


# ---- generated pictures


def test_a_picture_is_a_function_of_seed_split_and_index() -> None:
    for make in (vision.images, vision.segmentation):

        def first(make: Any = make, **keywords: Any) -> Tensor:
            image: Tensor = make(size=16, **keywords)[0][0]
            return image

        assert torch.equal(first(), first(samples=10**12))
        assert not torch.equal(first(), first(split="test"))
        assert not torch.equal(first(), first(seed=1))


def test_images_of_a_class_share_its_pattern_in_every_split() -> None:
    def means(split: str) -> Tensor:
        dataset: Any = vision.images(split, size=8, classes=4, samples=80)
        samples = [dataset[index] for index in range(80)]
        return torch.stack([torch.stack([image for image, label in samples if label == c]).mean(0) for c in range(4)])

    train, test = means("train").flatten(1), means("test").flatten(1)
    assert torch.cdist(train, test).argmin(dim=1).tolist() == [0, 1, 2, 3]


def test_masks_have_objects_and_ignored_edges() -> None:
    dataset: Any = vision.segmentation(size=32, classes=21)
    image, mask = dataset[0]
    assert (image.shape, image.dtype, mask.shape, mask.dtype) == ((3, 32, 32), torch.float32, (32, 32), torch.int64)
    classes = set(torch.stack([dataset[index][1] for index in range(40)]).flatten().tolist())
    assert {0, 255} < classes <= {*range(21), 255}
    assert len(classes) > 15


@pytest.mark.parametrize(
    ("keywords", "words"),
    [({"split": "val"}, "split is 'val'"), ({"size": 4}, "size is 4"), ({"samples": 0}, "samples is 0")],
)
def test_a_wrong_argument_is_an_input_error(keywords: dict[str, Any], words: str) -> None:
    for make in (vision.images, vision.segmentation):
        with pytest.raises(InputError, match=words):
            make(**keywords)


@pytest.mark.soak
def test_a_resnet_learns_the_generated_images() -> None:
    torch.manual_seed(0)
    model = vision.resnet18(classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dataset: Any = vision.images(size=8, classes=4, samples=8)
    images, labels = default_collate([dataset[index] for index in range(8)])
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]

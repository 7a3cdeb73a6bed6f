"""Crops are within the pictures, have the right sizes, and are drawn from the generator that the loader seeds."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.workloads.images.augment import (
    View,
    apply_view,
    center_crop,
    normalize,
    random_box,
    random_resized_crop,
    random_view,
    whole_view,
)
from tests.workloads.images.pictures import noise

SIZES = [(500, 375), (20, 1000), (1000, 20), (3, 3), (1, 1)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


@pytest.mark.parametrize("size", SIZES)
def test_a_random_box_lies_within_the_picture(size: tuple[int, int]) -> None:
    for _ in range(200):
        left, top, right, bottom = random_box(size, (0.08, 1.0))
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


def test_random_boxes_have_torchvisions_areas_and_proportions() -> None:
    boxes = [random_box((400, 400), (0.25, 0.5)) for _ in range(500)]
    areas = np.array([(right - left) * (bottom - top) / 400**2 for left, top, right, bottom in boxes])
    ratios = np.array([(right - left) / (bottom - top) for left, top, right, bottom in boxes])
    assert areas.min() > 0.245
    assert areas.max() < 0.505
    assert 0.36 < areas.mean() < 0.39
    assert ratios.min() > 0.74
    assert ratios.max() < 1.35
    assert 0.9 < np.exp(np.log(ratios).mean()) < 1.1


def test_half_of_the_pictures_are_mirrored() -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    picture = Image.fromarray(pixels)
    mirrored = [np.asarray(random_resized_crop(picture, 8, (1.0, 1.0)))[0, 0, 0] > 128 for _ in range(200)]
    assert 70 < sum(mirrored) < 130


@pytest.mark.parametrize(
    "draw", [lambda: random_box((50, 40), (0.1, 1.0)), lambda: random_view((50, 40), 32, (0.5, 2))]
)
def test_crops_are_a_function_of_the_seed(draw: Callable[[], object]) -> None:
    first = [draw() for _ in range(3)]
    random.seed(0)
    assert [draw() for _ in range(3)] == first
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(0)
    assert [draw() for _ in range(3)] == first


def test_a_centre_crop_equals_resizing_and_cropping() -> None:
    picture = noise(0, 640, 480).resize((64, 48)).resize((640, 480))  # smooth
    resized = np.asarray(picture.resize((341, 256), Image.Resampling.BILINEAR), int)
    expected = resized[16:240, 58:282]
    assert np.abs(np.asarray(center_crop(picture, 224), int) - expected).mean() < 2


def test_normalization_equals_torchvisions() -> None:
    from meshwright.user.call import load

    transforms = load("torchvision:transforms")
    both = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    picture = noise(1)
    torch.testing.assert_close(normalize(picture), both(picture))
    assert normalize(picture).is_contiguous()


@pytest.mark.parametrize("size", SIZES)
def test_views_fit_into_their_square(size: tuple[int, int]) -> None:
    views = [random_view(size, 32, (0.5, 2.0)) for _ in range(100)] + [whole_view(size, 32)]
    for view in views:
        assert all(
            corner >= 0 and corner + extent <= 32 for corner, extent in zip(view.corner, view.shape, strict=True)
        )
        left, top, right, bottom = view.box
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
        apply_view(Image.new("RGB", size), Image.new("L", size), view, 32, 255)


def test_a_mirrored_view_mirrors_picture_and_mask() -> None:
    picture, mask = noise(2), noise(3).convert("L")
    straight = apply_view(picture, mask, View((0, 0, 24, 20), (24, 20), (0, 0)), 24, 255)
    turned = apply_view(picture, mask, View((0, 0, 24, 20), (24, 20), (0, 0), mirrored=True), 24, 255)
    for one, other in zip(straight, turned, strict=True):
        assert torch.equal(one.flip(-1), other)
        assert not torch.equal(one, other)


def test_random_views_show_every_part_of_a_large_picture() -> None:
    boxes = np.array([random_view((400, 300), 100, (0.5, 2.0)).box for _ in range(300)])
    assert boxes[:, :2].min(axis=0).max() == 0
    assert boxes[:, 2].max() > 395
    assert boxes[:, 3].max() > 295
    widths = boxes[:, 2] - boxes[:, 0]
    assert widths.min() < 55  # 100 pixels of 200%
    assert widths.max() > 180  # and of 50%

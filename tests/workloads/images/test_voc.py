"""PASCAL VOC: pictures and masks are transformed together, samples do not depend on the ranks, errors name the file."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.errors import InputError
from meshwright.workloads.images.augment import MEAN, STD
from meshwright.workloads.images.voc import voc
from tests.workloads.images.pictures import are_equal, global_batches, make_voc_folders, save_mask

NAMES = tuple(f"2012_{number:06}" for number in range(20))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_voc_folders(tmp_path, NAMES)


def assert_refused(words: str, **keywords: Any) -> str:
    with pytest.raises(InputError, match=words) as caught:
        voc(**keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", [".", "VOC2012", "VOCdevkit/VOC2012"])
def test_root_may_be_any_folder_that_contains_voc2012(tmp_path: Path, place: str) -> None:
    make_voc_folders(tmp_path / place, NAMES[:3], "val")
    dataset = voc("val", root=str(tmp_path), size=32)
    assert [Path(file).stem for file in dataset.files(1)] == [NAMES[1]] * 2
    assert len(dataset) == 3


def test_evaluation_samples_are_whole_pictures_with_their_class_numbers(root: Path) -> None:
    image, mask = voc(root=str(root), size=32, augment=False)[1]
    assert (image.shape, image.dtype, mask.shape, mask.dtype) == ((3, 32, 32), torch.float32, (32, 32), torch.int64)
    file = np.array(Image.open(root / "SegmentationClass" / f"{NAMES[1]}.png"))
    assert torch.equal(mask[6:26, 4:28], torch.from_numpy(file).long())  # 24 × 20 in the middle, not a pixel changed
    pixels = torch.from_numpy(np.array(Image.open(root / "JPEGImages" / f"{NAMES[1]}.jpg"))).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1)
    torch.testing.assert_close(image[:, 6:26, 4:28], expected)
    assert int((mask != 255).sum()) == int((file != 255).sum())  # pixels outside the picture are ignored
    assert not image[:, :6].any()


def test_a_larger_picture_is_evaluated_as_a_whole(root: Path) -> None:
    _, mask = voc(root=str(root), size=12, augment=False)[1]
    assert mask[1:11].unique().tolist() == [1, 2, 255]
    assert (mask[:1] == 255).all()
    assert (mask[11:] == 255).all()


def test_pictures_and_masks_are_transformed_together(tmp_path: Path) -> None:
    """Where the mask is a function of the picture, it still is after resizing, cropping and mirroring."""
    make_voc_folders(tmp_path, NAMES[:1])
    random.seed(0)
    classes = np.kron(np.random.RandomState(0).randint(0, 4, (5, 6)), np.ones((8, 8))).astype(np.uint8)
    Image.fromarray(classes * 80).convert("RGB").save(tmp_path / "JPEGImages" / f"{NAMES[0]}.jpg", quality=100)
    Image.fromarray(classes).save(tmp_path / "SegmentationClass" / f"{NAMES[0]}.png")
    dataset = voc(root=str(tmp_path), size=40)
    matches, sizes = [], set()
    for _ in range(40):
        image, mask = dataset[0]
        colors = image * torch.tensor(STD).reshape(3, 1, 1) + torch.tensor(MEAN).reshape(3, 1, 1)
        valid = mask != 255
        sizes.add(int(valid.sum()))
        matches.append(((colors[0] * 255 / 80).round() == mask)[valid].float().mean())
    assert sum(matches) / 40 > 0.85  # all except the blurred edges
    assert len(sizes) > 10


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (2, 2)])
def test_augmented_batches_do_not_depend_on_ranks_and_workers(root: Path, ranks: int, workers: int) -> None:
    dataset = voc(root=str(root), size=16)
    alone = global_batches(dataset)
    assert are_equal(global_batches(dataset, ranks, workers), alone)
    assert not torch.equal(alone[0][1], alone[3][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_batches_are_the_same_after_a_resume(root: Path, workers: int) -> None:
    dataset = voc(root=str(root), size=16)
    assert are_equal(global_batches(dataset, 2, workers, start=(1, 1)), global_batches(dataset)[4:])


def test_another_folder_of_masks_can_be_chosen(root: Path) -> None:
    (root / "SegmentationClassAug").mkdir()
    for name in NAMES:
        save_mask(root / "SegmentationClassAug" / f"{name}.png", [5])
    _, mask = voc(root=str(root), size=32, augment=False, masks="SegmentationClassAug")[0]
    assert mask.unique().tolist() == [5, 255]


# ---- errors


def test_the_error_for_missing_data_names_both_remedies() -> None:
    text = assert_refused("voc has no data")
    assert "VOCdevkit/VOC2012 with JPEGImages" in text
    assert "--set data.root=FOLDER" in text
    assert "--set data.synthetic=true" in text


@pytest.mark.parametrize(("folder", "suffix"), [("JPEGImages", "jpg"), ("SegmentationClass", "png")])
def test_a_damaged_file_is_an_error_or_ignored_with_a_warning(root: Path, folder: str, suffix: str) -> None:
    file = root / folder / f"{NAMES[2]}.{suffix}"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(InputError, match=f"{file}: cannot be decoded"):
        voc(root=str(root), size=16)[2]
    dataset = voc(root=str(root), size=16, damaged="skip")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        image, mask = dataset[2]
        dataset[2]
    assert [str(file) in str(warning.message) for warning in caught_warnings] == [True]
    assert (mask == 255).all()
    torch.testing.assert_close(image[:, 3, 3], -torch.tensor(MEAN) / torch.tensor(STD))


def test_a_mask_of_another_size_is_an_input_error(root: Path) -> None:
    save_mask(root / "SegmentationClass" / f"{NAMES[0]}.png", [1], width=25)
    for damaged in ("fatal", "skip"):
        with pytest.raises(InputError, match=r"25 × 20, but its picture .* is 24 × 20"):
            voc(root=str(root), size=16, damaged=damaged)[0]


def test_a_mask_of_colors_or_unknown_classes_is_an_input_error(root: Path) -> None:
    Image.new("RGB", (24, 20)).save(root / "SegmentationClass" / f"{NAMES[0]}.png")
    with pytest.raises(InputError, match=r"class numbers.* but this one's mode is RGB"):
        voc(root=str(root), size=16)[0]
    save_mask(root / "SegmentationClass" / f"{NAMES[0]}.png", [0, 255, 21])
    with pytest.raises(InputError, match="holds class 21, but classes is 21"):
        voc(root=str(root), size=16)[0]
    assert voc(root=str(root), size=16, classes=22)[0]


def test_a_wrong_folder_layout_is_an_input_error(root: Path, tmp_path: Path) -> None:
    assert_refused("no folder .*nowhere", root=str(tmp_path / "nowhere"))
    assert_refused("split is 'trian', but there is no .*did you mean 'train'", split="trian", root=str(root))
    assert_refused("no folder .*Masks", root=str(root), masks="Masks")
    (root / "SegmentationClass" / f"{NAMES[3]}.png").unlink()
    assert_refused(f"train.txt lists {NAMES[3]}, but there is no .*{NAMES[3]}.png", root=str(root))
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("\n")
    assert_refused("lists no pictures", split="val", root=str(root))
    (root / "empty").mkdir()
    assert_refused("expected is VOCdevkit", root=str(root / "empty"))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [({"size": 0}, "size is 0"), ({"classes": 256}, "classes is 256"), ({"scale": [2, 1]}, r"scale is \[2, 1\]")],
)
def test_a_wrong_argument_is_an_input_error(root: Path, keywords: dict[str, Any], words: str) -> None:
    assert_refused(words, root=str(root), **keywords)

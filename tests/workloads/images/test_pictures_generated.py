"""Generated data sets are files in the real layouts, the same every time, and their classes can be learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.workloads.images.image_folder import image_folder
from meshwright.workloads.images.pictures_generated import make_image_folder, make_voc
from meshwright.workloads.images.voc import voc


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "meshwright" / "synthetic"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_synthetic_pictures_are_files_that_the_same_loader_reads(cache: Path) -> None:
    dataset = image_folder(synthetic=True, classes=3, samples=24, size=16)
    assert (len(dataset), dataset.classes) == (24, ("class_0", "class_1", "class_2"))
    assert Path(dataset.file(0)).is_relative_to(cache)
    root = dataset.folder.parent
    again = image_folder(root=str(root), classes=3, size=16, augment=False)
    generated = image_folder(synthetic=True, classes=3, samples=24, size=16, augment=False)
    assert torch.equal(again[5][0], generated[5][0])
    evaluation = image_folder("val", synthetic=True, classes=3, samples=24)
    assert {evaluation[n][1] for n in range(len(evaluation))} == {0, 1, 2}
    assert len(list(cache.glob("image_folder*"))) == 1  # one folder for both splits


def test_synthetic_scenes_are_files_that_the_same_loader_reads(cache: Path) -> None:
    dataset = voc(synthetic=True, samples=8, size=32)
    assert len(dataset) == 8
    picture, mask = dataset.files(0)
    assert Path(mask).is_relative_to(cache)
    voc_folder = dataset.pictures.parent
    assert voc_folder.parts[-2:] == ("VOCdevkit", "VOC2012")
    with Image.open(mask) as image:
        assert image.mode == "P"
        assert image.getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]  # type: ignore[index]  # VOC's
        numbers = set(np.asarray(image).flatten().tolist())
    assert {0, 255} < numbers <= {*range(21), 255}
    assert Path(picture).suffix == ".jpg"
    assert len(voc("trainval", synthetic=True, samples=8)) == 9
    assert len(voc("val", synthetic=True, samples=8)) == 1


def test_generated_files_are_the_same_every_time(tmp_path: Path) -> None:
    for make in (make_image_folder, make_voc):
        for name in ("first", "second"):
            make(tmp_path / make.__name__ / name, classes=3, samples=4)
        folder = tmp_path / make.__name__
        assert contents(folder / "first") == contents(folder / "second")


def test_a_class_can_be_recognized_by_its_hue() -> None:
    """Pictures of the validation split are classified by the nearest mean color."""

    def colors(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        dataset = image_folder(split, synthetic=True, classes=6, samples=96, size=8)
        images, labels = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
        colors_shown = torch.stack(images).mean(dim=(2, 3))
        return colors_shown - colors_shown.mean(dim=1, keepdim=True), torch.tensor(labels)

    (train, labels), (unseen, truth) = colors("train"), colors("val")
    means = torch.stack([train[labels == label].mean(dim=0) for label in range(6)])
    assert (torch.cdist(unseen, means).argmin(dim=1) == truth).float().mean() > 0.9


def test_classes_in_generated_masks_can_be_recognized_by_color() -> None:
    dataset: Any = voc(synthetic=True, classes=5, samples=24, size=96, augment=False)
    images, masks = zip(*(dataset[index] for index in range(24)), strict=True)
    pixels, classes = torch.stack(images).permute(0, 2, 3, 1)[:, ::3, ::3], torch.stack(masks)[:, ::3, ::3]
    colors_shown = pixels[:16]
    means = torch.stack([colors_shown[classes[:16] == label].mean(dim=0) for label in range(5)])
    counted = classes[16:] != 255
    assert (torch.cdist(pixels[16:][counted], means).argmin(dim=1) == classes[16:][counted]).float().mean() > 0.9

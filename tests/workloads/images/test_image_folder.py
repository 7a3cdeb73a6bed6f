"""Pictures in class folders: samples are those of torchvision and do not depend on the ranks; errors name the file."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.errors import InputError
from meshwright.user.call import load
from meshwright.workloads.images.augment import MEAN, STD
from meshwright.workloads.images.image_folder import image_folder
from tests.workloads.images.pictures import BATCH, are_equal, global_batches, make_folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folders(make_folders(tmp_path), "val", each=2)


def damage(root: Path) -> Path:
    """Truncates a picture in the middle of its pixels, and returns its path."""
    file = root / "train" / "bee" / "004.png"
    file.write_bytes(file.read_bytes()[:300])
    return file


def assert_refused(words: str, **keywords: Any) -> str:
    with pytest.raises(InputError, match=words) as caught:
        image_folder(**keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- samples


def test_samples_and_their_order_are_those_of_torchvision(root: Path) -> None:
    (root / "train" / "ant" / "deep").mkdir()
    (root / "train" / "ant" / "000.png").rename(root / "train" / "ant" / "deep" / "0.PNG")
    (root / "train" / "ant" / "notes.txt").write_text("not a picture")
    theirs = load("torchvision.datasets:ImageFolder")(root / "train")
    ours = image_folder(root=str(root))
    assert [(ours.file(n), ours[n][1]) for n in range(len(ours))] == [(str(Path(f)), c) for f, c in theirs.samples]
    assert list(ours.classes) == theirs.classes == ["ant", "bee"]


def test_evaluation_samples_are_normalized_centre_crops(tmp_path: Path) -> None:
    folder = tmp_path / "val" / "only"
    folder.mkdir(parents=True)
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:, :16], pixels[:, 80:] = 255, 255  # outside of the middle square of 64
    pixels[4:60, 20:76] = (10, 120, 250)  # 56 = 64 × 224 / 256
    Image.fromarray(pixels).save(folder / "0.png")
    image, label = image_folder("val", root=str(tmp_path), size=28)[0]
    expected = (torch.tensor([10, 120, 250]) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert (image.shape, image.dtype, label) == ((3, 28, 28), torch.float32, 0)
    torch.testing.assert_close(image[:, 1:-1, 1:-1], expected.reshape(3, 1, 1).expand(3, 26, 26))


def test_pictures_of_any_mode_become_rgb(tmp_path: Path) -> None:
    folder = tmp_path / "val" / "kinds"
    folder.mkdir(parents=True)
    for mode in ("L", "RGBA", "P", "1", "CMYK", "LA"):
        name = f"{mode}.{'jpeg' if mode == 'CMYK' else 'png'}"
        Image.new("RGB", (9, 9), "white").convert(mode).save(folder / name)
    dataset = image_folder("val", root=str(tmp_path), size=8)
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    for index in range(6):
        torch.testing.assert_close(dataset[index][0][:, 4, 4], white, atol=0.02, rtol=0)


def test_training_samples_are_random_crops_and_evaluation_samples_are_not(root: Path) -> None:
    training, evaluation = image_folder(root=str(root), size=16), image_folder("val", root=str(root), size=16)
    assert not torch.equal(training[0][0], training[0][0])
    assert torch.equal(evaluation[0][0], evaluation[0][0])
    still = image_folder(root=str(root), size=16, augment=False)
    assert torch.equal(still[0][0], still[0][0])


def test_classes_are_numbered_by_the_training_folders(root: Path) -> None:
    for file in (root / "val" / "ant").iterdir():
        file.unlink()
    (root / "val" / "ant").rmdir()
    assert {image_folder("val", root=str(root))[n][1] for n in range(2)} == {1}
    (root / "val" / "wasp").mkdir()
    assert_refused("val/wasp: .*train has no such class", split="val", root=str(root))


# ---- batches do not depend on ranks


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (2, 2)])
def test_augmented_batches_do_not_depend_on_ranks_and_workers(root: Path, ranks: int, workers: int) -> None:
    dataset = image_folder(root=str(root), size=16)
    alone = global_batches(dataset)
    assert [len(labels) for _, labels in alone] == [BATCH, BATCH, 4] * 2
    assert are_equal(global_batches(dataset, ranks, workers), alone)
    assert not torch.equal(alone[0][0].sum(), alone[3][0].sum())  # another epoch, other parts


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_batches_are_the_same_after_a_resume(root: Path, workers: int) -> None:
    dataset = image_folder(root=str(root), size=16)
    assert are_equal(global_batches(dataset, 2, workers, start=(0, 2)), global_batches(dataset)[2:])


# ---- errors


def test_the_error_for_missing_data_names_both_remedies() -> None:
    text = assert_refused("image_folder has no data")
    assert "train/<class>/" in text
    assert "--set data.root=FOLDER" in text
    assert "--set data.synthetic=true" in text


def test_a_damaged_file_ends_the_run_with_its_path(root: Path) -> None:
    file = damage(root)
    dataset = image_folder(root=str(root), size=16)
    with pytest.raises(InputError, match=r"cannot be decoded: .*truncated.*data.damaged=skip") as caught:
        dataset[14]
    assert str(file) in str(caught.value)
    with pytest.raises(InputError, match="cannot be decoded") as caught:
        global_batches(dataset, workers=1)
    assert str(caught.value).startswith(str(file))  # not with the worker's traceback


def test_a_skipped_file_gives_one_warning_and_no_loss(root: Path) -> None:
    file = damage(root)
    dataset = image_folder(root=str(root), size=16, damaged="skip")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        image, label = dataset[14]
        dataset[14]
    assert [str(file) in str(warning.message) for warning in caught_warnings] == [True]
    black = -torch.tensor(MEAN) / torch.tensor(STD)
    torch.testing.assert_close(image, black.reshape(3, 1, 1).expand(3, 16, 16))
    scores = torch.randn(2, 2)
    both = torch.nn.functional.cross_entropy(scores, torch.tensor([label, 1]))
    assert torch.equal(both, torch.nn.functional.cross_entropy(scores[1:], torch.tensor([1])))


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_skipping_leaves_the_other_samples_as_they_were(root: Path) -> None:
    intact = image_folder(root=str(root), size=16)
    before = global_batches(intact)
    damage(root)
    after = global_batches(image_folder(root=str(root), size=16, damaged="skip"))
    for (images, labels), (images_after, labels_after) in zip(before, after, strict=True):
        valid = labels_after >= 0
        assert valid.sum() >= len(labels) - 1
        assert torch.equal(images[valid], images_after[valid])
        assert torch.equal(labels[valid], labels_after[valid])
    assert sum(int((labels < 0).sum()) for _, labels in after) == 2  # once per epoch


def test_a_wrong_folder_layout_is_an_input_error(root: Path, tmp_path: Path) -> None:
    assert_refused("no folder .*nowhere", root=str(tmp_path / "nowhere"))
    assert_refused("has no folder vall; expected is .*did you mean 'val'", split="vall", root=str(root))
    assert_refused("has 2 class folders, but classes is 1000", root=str(root), classes=1000)
    (root / "train" / "empty").mkdir()
    assert_refused("train/empty: this class has no pictures", root=str(root))
    (root / "flat").mkdir()
    assert_refused("flat holds no class folders", split="flat", root=str(root))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"size": 0}, "size is 0"),
        ({"scale": [0.5, 2]}, r"scale is \[0.5, 2\]"),
        ({"damaged": "ignore"}, "damaged is 'ignore': write fatal or skip"),
        ({"shorter_side": 0}, "shorter_side is 0"),
        ({"synthetic": True, "classes": 1}, "classes is 1"),
    ],
)
def test_a_wrong_argument_is_an_input_error(root: Path, keywords: dict[str, Any], words: str) -> None:
    assert_refused(words, root=str(root), **keywords)


def test_labels_are_known_without_reading_pictures(tmp_path: Path) -> None:
    from meshwright.data.part_balance import describe_parts, labels_of
    from meshwright.data.partition import PartPartition

    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(30):
            (tmp_path / "train" / name / f"{number}.jpg").write_bytes(b"never read")
    labels = labels_of(image_folder("train", str(tmp_path)))
    assert labels == [0] * 30 + [1] * 30
    # Samples are ordered by class: divided by sample, each of two ranks would have one class.
    assert "skewed" in describe_parts(PartPartition(60, 8, 2, 0, 2), labels)[1]

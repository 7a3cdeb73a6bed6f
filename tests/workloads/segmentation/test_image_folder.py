"""Images, volumes and masks are read from their formats and cut together; errors name the file."""

import gzip
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.errors import InputError
from meshwright.workloads.segmentation.image_folder import images_and_masks
from meshwright.workloads.segmentation.nifti import read_nifti, write_nifti


def make_folders(root: Path, split: str = "train") -> Path:
    for kind in ("images", "masks"):
        (root / split / kind).mkdir(parents=True)
    return root / split


def assert_refused(words: str, **keywords: Any) -> None:
    with pytest.raises(InputError, match=words) as caught:
        images_and_masks(**keywords)[0]
    assert "\n" not in str(caught.value)


# ---- NIfTI


@pytest.mark.parametrize("name", ["volume.nii", "volume.nii.gz"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_a_volume_is_read_back_as_it_was_written(tmp_path: Path, name: str, dtype: str) -> None:
    voxels = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    write_nifti(tmp_path / name, voxels)
    again = read_nifti(tmp_path / name)
    assert again.dtype == voxels.dtype
    assert np.array_equal(again, voxels)


def test_byte_order_scale_and_extensions_of_other_programs_are_read(tmp_path: Path) -> None:
    voxels = np.arange(6, dtype=">i2").reshape(2, 3)
    header = bytearray(368)  # an extension of 16 bytes follows the header
    struct.pack_into(">i", header, 0, 348)
    struct.pack_into(">8h", header, 40, 4, 2, 3, 1, 1, 0, 0, 0)
    struct.pack_into(">h", header, 70, 4)
    struct.pack_into(">3f", header, 108, 368, 0.5, -1)
    header[344:348] = b"n+1\0"
    (tmp_path / "a.nii").write_bytes(bytes(header) + voxels.tobytes(order="F"))
    assert np.array_equal(read_nifti(tmp_path / "a.nii"), voxels * 0.5 - 1)


def test_damaged_and_unknown_nifti_files_are_input_errors(tmp_path: Path) -> None:
    file = tmp_path / "a.nii"
    write_nifti(file, np.zeros((4, 4, 4), np.uint8))
    whole = file.read_bytes()

    def changed(offset: int, form: str, *values: Any) -> bytes:
        content = bytearray(whole)
        struct.pack_into(form, content, offset, *values)
        return bytes(content)

    for content, words in (
        (whole[:-1], "63 bytes of voxels, but its sizes need 64"),
        (whole[:100], "is no NIfTI file"),
        (changed(0, "<i", 540), "is a NIfTI-2 file"),
        (changed(40, "<2h", 2, -1), "2 dimensions of sizes"),
        (changed(70, "<h", 128), "datatype 128"),
        (changed(108, "<f", float("nan")), "voxels begin at byte nan"),
        (changed(344, "<4s", b"ni1"), "voxels in another file"),
        (changed(40, "<8h", 7, *[32767] * 7), "is damaged: it has 64 bytes"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_nifti(file)
    compressed = tmp_path / "a.nii.gz"
    for content in (gzip.compress(whole)[:-20], b"no gzip"):
        compressed.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.nii\.gz is damaged"):
            read_nifti(compressed)


# ---- folders


def test_png_and_npy_files_with_the_same_name_are_pairs(tmp_path: Path) -> None:
    folder = make_folders(tmp_path)
    gray = np.arange(24, dtype=np.uint16).reshape(4, 6) * 1000
    Image.fromarray(gray).save(folder / "images" / "a.png")  # 16 bits
    np.save(folder / "masks" / "a.npy", (gray > 9000) * 255)
    (folder / "images" / "notes.md").write_text("other files are ignored")
    image, mask = images_and_masks("train", str(tmp_path), size=[4, 6], augment=False)[0]
    assert (image.shape, image.dtype, mask.dtype) == ((1, 4, 6), torch.float32, torch.int64)
    pixels = gray.astype(np.float64)
    assert np.allclose(image[0], (pixels - pixels.mean()) / pixels.std(), atol=1e-5)
    assert np.array_equal(mask, gray > 9000)  # with two classes, 255 is class 1


def test_channels_may_be_first_or_last(tmp_path: Path) -> None:
    folder = make_folders(tmp_path)
    colors = np.random.RandomState(0).randint(0, 255, (4, 4, 3)).astype(np.uint8)
    Image.fromarray(colors).save(folder / "images" / "a.png")
    np.save(folder / "images" / "b.npy", np.moveaxis(colors, -1, 0))
    for name in "ab":
        np.save(folder / "masks" / f"{name}.npy", np.zeros((4, 4), np.uint8))
    dataset = images_and_masks("train", str(tmp_path), channels=3, size=4, augment=False)
    assert torch.equal(dataset[0][0], dataset[1][0])
    assert_refused("no image of 2 dimensions and 2 channels", root=str(tmp_path), channels=2, size=4)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_image_and_mask_are_cut_and_mirrored_together(tmp_path: Path, dimensions: int) -> None:
    folder = make_folders(tmp_path)
    mask = np.random.RandomState(0).randint(0, 3, (6, 9, 7)[:dimensions])
    np.save(folder / "images" / "a.npy", mask * 10.0)
    np.save(folder / "masks" / "a.npy", mask)
    dataset = images_and_masks("train", str(tmp_path), dimensions=dimensions, classes=3, size=8)
    levels = [float(level) for level in np.unique((mask - mask.mean()) / mask.std()).astype(np.float32)]
    samples = []
    for seed in range(6):
        random.seed(seed)
        image, part = dataset[0]
        assert image.shape == (1, *[8] * dimensions)
        expected = torch.tensor(levels)[part]
        is_padding = image[0] == 0
        assert torch.allclose(image[0][~is_padding], expected[~is_padding], atol=1e-4)
        assert not part[is_padding].any()
        samples.append(part)
    assert any(not torch.equal(samples[0], other) for other in samples[1:])
    middle = images_and_masks("train", str(tmp_path), dimensions=dimensions, classes=3, size=4, augment=False)
    assert np.array_equal(middle[0][1], mask[1:5, 2:6] if dimensions == 2 else mask[1:5, 2:6, 1:5])


def test_generated_volumes_are_nifti_files_and_images_are_png_files() -> None:
    for dimensions, suffix in ((2, ".png"), (3, ".nii.gz")):
        dataset = images_and_masks(synthetic=True, dimensions=dimensions, classes=3, size=16, samples=3)
        assert len(dataset) == 3
        assert all(file.name.endswith(suffix) for pair in dataset.pairs for file in pair)
        image, mask = dataset[0]
        assert image.shape == (1, *mask.shape)
    assert len(images_and_masks("val", synthetic=True, channels=2, size=16, samples=3)) == 1


def test_wrong_files_and_arguments_are_input_errors(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert_refused("--set data.root=FOLDER.*--set data.synthetic=true")
    assert_refused("there is no folder .*train/images", root=root)
    folder = make_folders(tmp_path)
    assert_refused("has no images", root=root)
    np.save(folder / "images" / "a.npy", np.zeros((4, 4)))
    assert_refused("a.npy has no mask", root=root)
    np.save(folder / "masks" / "a.npy", np.zeros((4, 5)))
    assert_refused(r"has the size \(4, 5\), but its image .* has \(4, 4\)", root=root)
    np.save(folder / "masks" / "a.npy", np.full((4, 4), 3))
    assert_refused("holds class 3, but classes is 3", root=root, classes=3)
    np.save(folder / "masks" / "a.npy", np.full((4, 4), 0.5))
    assert_refused("numbers with fractions", root=root)
    (folder / "images" / "a.png").write_bytes(b"no picture")
    assert_refused("files with equal names", root=root)
    (folder / "images" / "a.npy").unlink()
    assert_refused("a.png cannot be decoded", root=root)
    for keywords, words in (
        ({"dimensions": 4}, "dimensions is 4"),
        ({"classes": 1}, "classes is 1"),
        ({"size": [4, 4, 4]}, r"size is \[4, 4, 4\]"),
        ({"samples": 0}, "samples is 0"),
    ):
        assert_refused(words, synthetic=True, **keywords)

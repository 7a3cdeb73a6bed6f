"""Reading picture files: pixels do not depend on the cache of decoded pictures, even if it is damaged."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshwright.errors import InputError
from meshwright.workloads.images import picture_file
from meshwright.workloads.images.image_folder import image_folder
from meshwright.workloads.images.picture_file import ReadingOptions, UndecodableError, read_mask, read_picture
from meshwright.workloads.images.voc import voc
from tests.workloads.images.pictures import are_equal, global_batches, make_folders, make_voc_folders, noise, save_mask


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "large.jpg"
    noise(0, 400, 300).save(path, quality=90)
    return path


def pixels(file: Path, **settings: Any) -> np.ndarray:
    return np.asarray(read_picture(str(file), ReadingOptions(**settings)))


def cache_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_large_pictures_are_reduced_to_the_shorter_side(file: Path, tmp_path: Path) -> None:
    assert pixels(file, shorter_side=60).shape == (60, 80, 3)
    assert pixels(file, shorter_side=300).shape == pixels(file, shorter_side=1000).shape == (300, 400, 3)
    smooth = tmp_path / "smooth.png"
    noise(1, 8, 6).resize((400, 300), Image.Resampling.BICUBIC).save(smooth)
    full = Image.open(smooth).resize((80, 60), Image.Resampling.BILINEAR)
    assert np.array_equal(pixels(smooth, shorter_side=60), np.asarray(full))
    Image.open(smooth).save(tmp_path / "smooth.jpg", quality=95)  # decoded at a half: nearly the same
    assert np.abs(pixels(tmp_path / "smooth.jpg", shorter_side=60).astype(int) - np.asarray(full, int)).mean() < 3


def test_masks_are_reduced_without_new_classes(tmp_path: Path) -> None:
    save_mask(tmp_path / "mask.png", [3, 255, 9], 240, 180)
    mask = np.asarray(read_mask(str(tmp_path / "mask.png"), ReadingOptions(shorter_side=30)))
    assert mask.shape == (30, 40)
    assert np.unique(mask).tolist() == [3, 9, 255]


@pytest.mark.parametrize("shorter_side", [None, 50])
def test_the_cache_is_used_and_does_not_change_pixels(file: Path, tmp_path: Path, shorter_side: int | None) -> None:
    plain = pixels(file, shorter_side=shorter_side)
    settings: dict[str, Any] = {"shorter_side": shorter_side, "cache": str(tmp_path / "cache")}
    assert np.array_equal(pixels(file, **settings), plain)
    (entry,) = cache_files(tmp_path / "cache")
    assert np.array_equal(np.asarray(Image.open(entry)), plain)
    Image.new("RGB", (1, 1)).save(entry, "PPM")
    assert pixels(file, **settings).shape == (1, 1, 3)  # so it was read


def test_the_cache_has_one_entry_per_file_and_setting(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    pixels(file, cache=str(folder))
    assert pixels(file, cache=str(folder), shorter_side=50).shape == (50, 67, 3)
    assert len(cache_files(folder)) == 2


def test_a_file_that_has_changed_is_decoded_again(tmp_path: Path) -> None:
    file, folder = tmp_path / "picture.bmp", str(tmp_path / "cache")  # without compression: always of one length
    noise(0).save(file)
    before = os.stat(file)
    pixels(file, cache=folder)
    noise(1).save(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert os.stat(file).st_size == before.st_size
    assert np.array_equal(pixels(file, cache=folder), np.asarray(noise(1)))


def test_an_incomplete_cache_entry_is_written_again(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    plain = pixels(file, cache=str(folder))
    (entry,) = cache_files(folder)
    for content in (entry.read_bytes()[:100], b"", b"P6\n40"):
        entry.write_bytes(content)
        assert np.array_equal(pixels(file, cache=str(folder)), plain)
        assert np.array_equal(np.asarray(Image.open(entry)), plain)
    assert cache_files(folder) == [entry]  # no incomplete files are left


def test_a_cache_that_cannot_be_written_gives_a_warning(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in range(256):
        (folder / f"{name:02x}").write_text("in the way")
    with pytest.warns(UserWarning, match=f"cache {folder}: a decoded picture cannot be written"):
        uncached = pixels(file, cache=str(folder))
    assert np.array_equal(uncached, pixels(file))


def test_a_cache_that_is_no_folder_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"cache is .*large.jpg, which is no folder"):
        ReadingOptions(cache=str(file))


@pytest.mark.parametrize("kind", ["folders", "scenes"])
def test_augmented_batches_do_not_depend_on_the_cache(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"{number}" for number in range(12))
    root = make_folders(tmp_path, each=6) if kind == "folders" else make_voc_folders(tmp_path, names)
    make: Any = image_folder if kind == "folders" else voc
    settings = {"root": str(root), "size": 8, "shorter_side": 14}
    cold = make(cache=str(tmp_path / "cache"), **settings)
    without = global_batches(make(**settings))
    assert are_equal(global_batches(cold, 2), without)

    def fail(*arguments: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(picture_file, "_decode_picture", fail)
    monkeypatch.setattr(picture_file, "_decode_mask", fail)
    assert are_equal(global_batches(make(cache=str(tmp_path / "cache"), **settings)), without)


def test_files_that_are_no_pictures_raise_an_undecodable_error(tmp_path: Path) -> None:
    file = tmp_path / "letter.jpg"
    file.write_text("dear reader")
    for cache in (None, str(tmp_path / "cache")):
        with pytest.raises(UndecodableError, match=r"letter.jpg: cannot be decoded"):
            pixels(file, cache=cache)
    with pytest.raises(UndecodableError, match=r"gone.jpg: cannot be decoded: .*No such file"):
        pixels(tmp_path / "gone.jpg")

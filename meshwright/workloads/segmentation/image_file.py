"""Reads images, volumes and masks of class numbers from their files: PNG, NumPy arrays (.npy) and NIfTI."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.errors import InputError
from meshwright.workloads.segmentation.nifti import SUFFIXES as NIFTI_SUFFIXES
from meshwright.workloads.segmentation.nifti import read_nifti

SUFFIXES = (".png", ".npy", *NIFTI_SUFFIXES)


def stem_of(file: Path) -> str | None:
    """The name of a file without its suffix, which may have two parts (.nii.gz). None for files of other formats."""
    suffix = max((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), key=len, default=None)
    return file.name[: -len(suffix)] if suffix else None


def read_image(file: Path, dimensions: int, channels: int) -> np.ndarray:
    """Returns an image or a volume as float32 (channels, *sizes), with 2 or 3 sizes. The file has it in this form, with
    the channels last, or without a dimension for the channel if there is only one."""
    if file.suffix == ".png":
        array = _read_png(file, lambda image: image.convert("RGB") if channels == 3 else _gray(image))
    else:
        array = _read_array(file)
    if array.ndim == dimensions:
        array = array[None]
    elif array.ndim == dimensions + 1 and array.shape[0] != channels and array.shape[-1] == channels:
        array = np.moveaxis(array, -1, 0)
    if array.ndim != dimensions + 1 or array.shape[0] != channels:
        raise InputError(
            f"{file} holds numbers of the shape {array.shape}, which is no image of {dimensions} dimensions and"
            f" {channels} channels: set dimensions and channels in data.train, data.eval and model"
        )
    return np.ascontiguousarray(array, np.float32)


def read_mask(file: Path, classes: int) -> np.ndarray:
    """Returns a mask as the class number of each pixel or voxel, int64 (*sizes). With two classes, every number but 0
    is class 1, because many masks of one object have 255 in it."""
    array = _read_png(file, lambda image: image) if file.suffix == ".png" else _read_array(file)
    if not np.array_equal(array, np.trunc(array)):
        raise InputError(f"{file} is no mask: it holds numbers with fractions, and a mask holds class numbers")
    mask = (array != 0).astype(np.int64) if classes == 2 else array.astype(np.int64)
    smallest, largest = int(mask.min()), int(mask.max())
    if smallest < 0 or largest >= classes:
        raise InputError(
            f"{file} holds class {smallest if smallest < 0 else largest}, but classes is {classes}: set"
            " data.train.classes, data.eval.classes and model.classes"
        )
    return mask


def _read_array(file: Path) -> np.ndarray:
    if file.suffix != ".npy":
        return read_nifti(file)
    try:
        array: np.ndarray = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{file} is damaged or no NumPy array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{file} holds {array.dtype}, not numbers: write it again as integers or floats")
    return array


def _read_png(file: Path, convert: Callable[..., object]) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return np.asarray(convert(image))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{file} cannot be decoded: {reason}: replace or remove it") from None


def _gray(image: object) -> object:
    """Returns a picture with one channel. Gray levels of 16 bits, as scanners have them, are kept."""
    return image if image.mode.startswith(("I", "L", "F")) else image.convert("L")  # type: ignore[attr-defined]

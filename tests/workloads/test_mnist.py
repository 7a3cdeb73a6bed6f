import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.workloads.idx import read_idx
from meshwright.workloads.mnist import SUBSET, Net, digits


def idx(array: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.astype(np.uint8).tobytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three training digits, in files that a test may damage."""
    images = np.arange(3 * 28 * 28).reshape(3, 28, 28)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([4, 0, 9])))
    return tmp_path


def labels_of(dataset: Any) -> list[int]:
    return [label for _, label in dataset.__getitems__(list(range(len(dataset))))]


def test_the_layers_of_the_network_are_fixed() -> None:
    net = Net()
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == {
        "conv1.weight": (32, 1, 3, 3),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3),
        "conv2.bias": (64,),
        "fc1.weight": (128, 9216),
        "fc1.bias": (128,),
        "fc2.weight": (10, 128),
        "fc2.bias": (10,),
    }
    layers = [net.conv1, nn.ReLU(), net.conv2, nn.MaxPool2d(2), nn.Flatten(), net.fc1, nn.ReLU(), net.fc2]
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(net(images), nn.Sequential(*layers)(images))


@pytest.mark.parametrize(("split", "size"), [("train", 10_000), ("test", 2_000)])
@pytest.mark.parametrize("synthetic", [False, True])
def test_digits_come_with_the_package(split: str, size: int, synthetic: bool) -> None:
    dataset: Any = digits(split, synthetic=synthetic)
    assert len(dataset) == size
    image, label = dataset[size - 1]
    assert (image.shape, image.dtype, type(label)) == ((1, 28, 28), torch.float32, int)
    counts = np.bincount(labels_of(dataset))
    assert len(counts) == 10
    assert counts.min() > 0.08 * size


def test_the_shipped_files_are_small_and_attributed() -> None:
    assert sum(file.stat().st_size for file in SUBSET.iterdir()) < 3_000_000
    text = (SUBSET / "ATTRIBUTION.md").read_text()
    for words in ("Yann LeCun", "Corinna Cortes", "Burges", "CC BY-SA 3.0", "subset"):
        assert words in text


def test_pixels_are_normalized_as_torchvision_does() -> None:
    raw = torch.from_numpy(read_idx(SUBSET / "t10k-images-idx3-ubyte.gz").copy())
    expected = (raw[[5, 2]].unsqueeze(1).float() / 255 - 0.1307) / 0.3081
    dataset: Any = digits("test")
    fetched = torch.stack([image for image, _ in dataset.__getitems__([5, 2])])
    torch.testing.assert_close(fetched, expected)
    assert torch.equal(dataset[2][0], fetched[1])
    pixels = torch.stack([image for image, _ in digits(limit=2000).__getitems__(list(range(2000)))])  # type: ignore[attr-defined]
    assert abs(pixels.mean()) < 0.02
    assert abs(pixels.std() - 1) < 0.02


def test_synthetic_digits_are_the_same_every_time_and_can_be_learned() -> None:
    first: Any = digits(synthetic=True)
    again: Any = digits(synthetic=True)
    unseen: Any = digits("test", synthetic=True)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images[:2000], unseen.images)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for begin in range(0, 10_000, 100):
        images, labels = _stacked(first, range(begin, begin + 100))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    images, labels = _stacked(unseen, range(2000))
    assert (net(images).argmax(1) == labels).float().mean() > 0.8


def _stacked(dataset: Any, indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*dataset.__getitems__(list(indices)), strict=True)
    return torch.stack(images), torch.tensor(labels)


def test_limit_selects_the_first_samples() -> None:
    whole: Any = digits("test")
    few: Any = digits("test", limit=3)
    assert labels_of(few) == whole.labels[:3]
    with pytest.raises(InputError, match="limit is 0"):
        digits(limit=0)


@pytest.mark.parametrize("folder", ["", "raw", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_root_may_be_any_folder_of_torchvisions_layout(
    root: Path, tmp_path_factory: pytest.TempPathFactory, folder: str, packed: bool
) -> None:
    moved = tmp_path_factory.mktemp("moved")
    (moved / folder).mkdir(parents=True, exist_ok=True)
    for file in root.iterdir():
        if packed:
            (moved / folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        else:
            shutil.copy(file, moved / folder)
    assert labels_of(digits(root=str(moved))) == [4, 0, 9]


def assert_refused(root: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        digits(root=str(root))
    assert str(root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_names_missing_files(root: Path) -> None:
    (root / "train-labels-idx1-ubyte").unlink()
    assert_refused(root, r"no train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz in any of .*MNIST/raw.*data.root")
    assert_refused(root / "nowhere", r"no train-images-idx3-ubyte")


def test_files_that_do_not_belong_together_are_refused(root: Path) -> None:
    images, labels = root / "train-images-idx3-ubyte", root / "train-labels-idx1-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(idx(np.array([4, 0])))
    assert_refused(root, "3 images, but .*labels.* has 2 labels")
    labels.write_bytes(idx(np.array([4, 12, 9])))
    assert_refused(root, r"label 1 is 12, outside 0\.\.9")
    labels.write_bytes(images.read_bytes())
    assert_refused(root, "labels.*holds 3 × 28 × 28 values, not labels")
    labels.write_bytes(good)
    images.write_bytes(good)
    assert_refused(root, "images.*holds 3 values, not images of 28 × 28")
    images.write_bytes(idx(np.zeros((3, 8, 8))))
    assert_refused(root, "holds 3 × 8 × 8 values")


def test_the_error_for_an_unknown_split_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="split is 'validation': MNIST has train and test"):
        digits("validation")

"""Rows in NumPy files: only the rows of a batch are read, and errors name the file."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.loading import train_batches
from meshwright.errors import InputError
from meshwright.workloads.regression import Regression
from meshwright.workloads.rows import rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 20), ("val", 4)):
        np.save(tmp_path / f"{split}_features.npy", np.arange(count * 3, dtype=np.float32).reshape(count, 3))
        np.save(tmp_path / f"{split}_targets.npy", np.arange(count, dtype=np.float32).reshape(count, 1))
    return tmp_path


def test_rows_and_columns_are_read_from_the_files(folder: Path) -> None:
    data = rows("train", str(folder), features=3)
    assert (len(data), data.width) == (20, 3)
    features, target = data[2]
    assert (features.tolist(), target.tolist()) == ([6, 7, 8], [2])
    many, targets = data.batch_of(np.array([3, 0]))
    assert many.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert targets.tolist() == [[3], [0]]
    assert data.columns(1, 3)[0][0].tolist() == [1, 2]
    assert pickle.loads(pickle.dumps(data.columns(1, 3)))[1][0].tolist() == [4, 5]
    assert len(pickle.dumps(data)) < 2000  # workers open the files themselves


@pytest.mark.parametrize("workers", [0, 1])
def test_every_row_is_loaded_once_with_its_target(folder: Path, workers: int) -> None:
    data = rows("train", str(folder), features=3)
    batches = [
        batch.microbatches[0].data
        for rank in range(2)
        for batch in train_batches(
            data, seed=0, global_batch=8, share=SampleShare(rank, 2), loading=LoadingOptions(workers), epochs=1
        )
    ]
    assert sorted(torch.cat([targets for _, targets in batches]).flatten().tolist()) == list(range(20))
    assert all(torch.equal(features[:, 0], 3 * targets[:, 0]) for features, targets in batches)


def test_generated_targets_are_a_linear_function_of_the_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train, val = (rows(split, None, True, features=4, count=300) for split in ("train", "val"))
    assert (len(train), len(val)) == (300, 30)
    features, targets = train.batch_of(range(300))
    rule = torch.linalg.lstsq(features, targets).solution
    others, expected = val.batch_of(range(30))
    assert float((others @ rule - expected).abs().max()) < 0.1
    assert float(expected.abs().max()) > 0.5


def test_wrong_files_and_arguments_are_input_errors(folder: Path) -> None:
    with pytest.raises(InputError, match=r"data.root=FOLDER, or --set data.synthetic=true"):
        rows()
    with pytest.raises(InputError, match=r"rows have 3 features, but data.train.features is 10"):
        rows("train", str(folder))
    with pytest.raises(InputError, match="split is 'test'"):
        rows("test", str(folder))
    np.save(folder / "val_targets.npy", np.zeros((5, 1), np.float32))
    with pytest.raises(InputError, match=r"val_features.npy has 4 rows, but .*val_targets.npy has 5"):
        rows("val", str(folder), features=3)
    (folder / "val_targets.npy").write_bytes(b"\x93NUMPY damaged")
    with pytest.raises(InputError, match=r"val_targets.npy is damaged or no NumPy array"):
        rows("val", str(folder), features=3)
    (folder / "val_targets.npy").unlink()
    with pytest.raises(InputError, match=r"there is no file .*val_targets.npy"):
        rows("val", str(folder), features=3)


def test_the_model_has_the_given_hidden_layers() -> None:
    assert [tuple(p.shape) for p in Regression(4, 2, [3]).parameters()] == [(3, 4), (3,), (2, 3), (2,)]

"""Tables of clicks are converted once to arrays; errors name the file and the row."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from meshwright.errors import InputError
from meshwright.workloads.recommender.clicks import Clicks, clicks

ROWS = [["1", "0", "20", "a", "x y"], ["0", "", "-3", "", "b"], ["1", "5", "1", "a", "b"]]


def write(root: Path, rows: list[list[str]], name: str = "train.csv") -> Path:
    separator = "," if name.endswith(".csv") else "\t"
    (root / name).write_text("".join(separator.join(row) + "\n" for row in rows))
    return root


def read(root: Path, **keywords: Any) -> Clicks:
    return clicks("train", str(root), integers=2, categories=2, **keywords)


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.txt"])
@pytest.mark.parametrize("header", [True, False])
def test_rows_are_numbers_hashes_and_labels(tmp_path: Path, name: str, header: bool) -> None:
    data = read(write(tmp_path, [["label", "i1", "i2", "c1", "c2"]] * header + ROWS, name))
    integers, categories, labels = data.batch_of([0, 1, 2])
    assert labels.tolist() == [1, 0, 1]
    assert torch.allclose(integers, torch.tensor([[0.0, 20], [0, 0], [5, 1]]).log1p())
    assert categories.dtype == torch.int64
    assert categories[0, 0] == categories[2, 0] != categories[1, 0] == 0  # an empty category is 0
    assert categories[1, 1] == categories[2, 1]
    assert all(torch.equal(part, many[1]) for part, many in zip(data[1], (integers, categories, labels), strict=True))
    assert len(pickle.dumps(data)) < 2000  # workers open the files themselves
    assert pickle.loads(pickle.dumps(data))[2][2] == 1


def test_a_table_is_converted_once_and_again_after_a_change(tmp_path: Path) -> None:
    folder = read(write(tmp_path, ROWS)).arrays.folder
    assert read(tmp_path).arrays.folder == folder
    write(tmp_path, ROWS[:2])
    os.utime(tmp_path / "train.csv", (0, 0))
    assert len(read(tmp_path)) == 2


def write_parquet(root: Path, columns: dict[str, Any], name: str = "train.parquet", **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), root / name, **options)
    return root


def test_a_parquet_table_gives_what_the_same_csv_gives(tmp_path: Path) -> None:
    expected = read(write(tmp_path, [*ROWS, ["0", "7", "8", "9", "c"]])).batch_of([0, 1, 2, 3])
    (tmp_path / "train.csv").unlink()
    columns = {
        "label": pyarrow.array([True, False, True, False]),
        "i1": pyarrow.array([0, None, 5, 7], pyarrow.int8()),
        "i2": pyarrow.array([20.0, -3.0, 1.0, 8.0], pyarrow.float32()),
        "c1": pyarrow.array(["a", None, "a", "9"]).dictionary_encode(),
        "c2": pyarrow.array([b"x y", b"b", b"b", b"c"]),
    }
    write_parquet(tmp_path, columns, row_group_size=2, compression="zstd")
    found = read(tmp_path).batch_of([0, 1, 2, 3])
    assert all(torch.equal(part, same) for part, same in zip(found, expected, strict=True))


def test_numbers_are_categories_as_their_text(tmp_path: Path) -> None:
    columns = {"label": [1, 0], "i1": [1, 2], "i2": [3, 4], "c1": [17, 18], "c2": ["17", ""]}
    _, categories, _ = read(write_parquet(tmp_path, columns)).batch_of([0, 1])
    assert categories[0, 0] == categories[0, 1] != categories[1, 0]
    assert categories[1, 1] == 0


def test_a_wrong_parquet_file_is_named_in_one_line(tmp_path: Path) -> None:
    columns = {"label": [1, 3], "i1": [1, 2], "i2": [3, 4], "c1": ["a", "b"], "c2": ["c", "d"]}
    with pytest.raises(InputError, match=r"train.parquet, row 2: the label is 3"):
        read(write_parquet(tmp_path, columns))
    whole = (tmp_path / "train.parquet").read_bytes()
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-8] + b"\xff\xff\xff\x7fPAR1"):
        (tmp_path / "train.parquet").write_bytes(damaged)
        with pytest.raises(InputError, match=r"train.parquet cannot be read as a Parquet file") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_without_pyarrow_a_parquet_file_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'meshwright\[parquet\]', or use a CSV file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["1", "2", "3", "a"], r"train.csv, row 2: 4 fields, but a label, 2 integers and 2 categories are 5"),
        (["2", "2", "3", "a", "b"], r"row 2: the label is 2"),
        (["1", "two", "3", "a", "b"], r"row 2: the label or one of the 2 fields after it is no number"),
        (["1", "inf", "3", "a", "b"], r"row 2: .*integers are finite"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(write(tmp_path, [ROWS[0], row]))
    assert "\n" not in str(caught.value)


def test_wrong_files_and_arguments_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--set data.root=FOLDER.*--set data.synthetic=true"):
        clicks()
    with pytest.raises(InputError, match=r"one file train.csv, .tsv, .txt or .parquet, but there is none"):
        read(tmp_path)
    write(write(tmp_path, ROWS), ROWS, "train.tsv")
    with pytest.raises(InputError, match=r"but there are train.csv and train.tsv"):
        read(tmp_path)
    (tmp_path / "train.tsv").unlink()
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no table of text"):
        read(tmp_path)
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(InputError, match="has no rows"):
        read(tmp_path)
    with pytest.raises(InputError, match="integers is 0"):
        clicks("train", str(tmp_path), integers=0)
    with pytest.raises(InputError, match="samples is 0"):
        clicks(synthetic=True, samples=0)


def test_generated_clicks_have_the_layout_of_criteo() -> None:
    train, val = (clicks(split, synthetic=True, samples=80) for split in ("train", "val"))
    assert (len(train), len(val)) == (80, 10)
    integers, categories, label = train[0]
    assert (integers.shape, categories.shape, label.shape) == ((13,), (26,), ())

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import InputError, StorageError
from meshwright.workloads.text.token_build import build_tokens


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"text {number}, ä\n" * 10)
    return folder


def read_tokens(out: Path, split: str, dtype: Any = "<u2") -> list[int]:
    return np.fromfile(out / f"{split}.bin", dtype).tolist()


def test_each_byte_is_a_token_and_each_document_ends_with_the_end_token(texts: Path, tmp_path: Path) -> None:
    info = build_tokens(texts, tmp_path / "out", validation=0)
    documents = [list(file.read_bytes()) for file in sorted(texts.iterdir())]
    expected = [token for document in documents for token in (*document, 256)]
    assert read_tokens(tmp_path / "out", "train") == expected
    assert set(info) == {"train"}
    description = json.loads((tmp_path / "out" / "train.json").read_text())
    assert description.pop("checksum")
    assert description == {
        "dtype": "uint16", "count": len(expected), "vocabulary": 258, "tokenizer": "bytes", "end": 256, "mask": 257
    }  # fmt: skip
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["train.bin", "train.json"]


def test_the_validation_share_is_met_and_no_token_is_lost(texts: Path, tmp_path: Path) -> None:
    info = build_tokens(texts, tmp_path / "out", validation=0.25)
    train, val = (read_tokens(tmp_path / "out", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (info["train"].count, info["val"].count)
    assert len(val) / len(train + val) == pytest.approx(0.25, abs=0.05)
    whole = sum(len(file.read_bytes()) + 1 for file in texts.iterdir())
    assert len(train) + len(val) == whole


def words_tokenizer(folder: Path, size: int) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{number}": number for number in range(size)} | {
        "[MASK]": size,
        "</s>": size + 1,
        "[UNK]": size + 2,
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(("size", "dtype"), [(300, "uint16"), (70_000, "uint32")])
def test_tokens_come_from_the_given_tokenizer_file(tmp_path: Path, size: int, dtype: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text(f"w7 w{size - 1} what")
    name = words_tokenizer(tmp_path, size)
    info = build_tokens(tmp_path / "texts", tmp_path / "out", name, validation=0)["train"]
    assert read_tokens(tmp_path / "out", "train", np.dtype(dtype)) == [7, size - 1, size + 2, size + 1]
    assert (info.dtype, info.vocabulary, info.mask, info.end) == (dtype, size + 3, size, size + 1)
    assert info.tokenizer == name


def test_a_missing_or_wrong_tokenizer_is_an_input_error(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no tokenizer file letters: write 'bytes' or the path"):
        build_tokens(texts, tmp_path / "out", "letters")
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="pip install tokenizers"):
        build_tokens(texts, tmp_path / "out", str(wrong))
    monkeypatch.undo()
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=f"{wrong} is no tokenizer.json"):
        build_tokens(texts, tmp_path / "out", str(wrong))


def test_a_failed_build_leaves_the_old_files_unchanged(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_tokens(texts, out, validation=0.2)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    (texts / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"zz\.txt, line 1"):
        build_tokens(texts, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    with pytest.warns(UserWarning, match=r"zz\.txt, line 1"):
        build_tokens(texts, out, damaged="skip")


def test_a_new_build_deletes_the_files_of_an_old_one(texts: Path, tmp_path: Path) -> None:
    build_tokens(texts, tmp_path / "out", validation=0.2)
    build_tokens(texts, tmp_path / "out", validation=0)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["train.bin", "train.json"]


def test_too_little_text_for_a_validation_split_is_an_input_error(texts: Path, tmp_path: Path) -> None:
    for file in sorted(texts.iterdir())[1:]:
        file.unlink()
    with pytest.raises(InputError, match=r"too few to set a share of 0\.1 of them aside"):
        build_tokens(texts, tmp_path / "out", validation=0.1)
    with pytest.raises(InputError, match=r"validation is 1\.5"):
        build_tokens(texts, tmp_path / "out", validation=1.5)


@pytest.mark.usefixtures("used_up_quota")
def test_a_disk_that_cannot_take_the_tokens_is_named_and_nothing_is_left(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"out: the quota of user \S+ on the disk mounted at .* is used up"):
        build_tokens(texts, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []

"""Recorded steps are read without executing anything, and a damaged file is one line that names it."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.train.output.record_file import read_record

OBSERVATION: dict[str, Any] = {
    **{name: {} for name in ("place", "gradients", "state", "divided", "tied")},
    "rank": 0,
    "data_rank": 0,
    "device": "cpu",
    "holds": (),
    "held": (),
}
CONTENT: dict[str, Any] = {
    "loss": torch.tensor(1.5),
    "norm": None,
    "gradients": {"w": torch.ones(2, 3)},
    "state": {"w": torch.zeros(2, 3), "n": torch.tensor(7), "b": torch.zeros(0, dtype=torch.bfloat16)},
    "seen": [OBSERVATION],
    "gradients_of": {},
    "state_of": {},
}


class _Execute:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(CONTENT, tmp_path / "step-0001.pt")
    return tmp_path / "step-0001.pt"


def refusal(file: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_record(file)
    assert str(caught.value).startswith(f"{file} ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_dtypes_and_layouts_are_read_as_torch_reads_them(file: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    state = {str(dtype): torch.ones(3, dtype=torch.int8).to(dtype) for dtype in dtypes}
    wide = torch.arange(12.0).reshape(3, 4)
    state |= {"view": wide.t()[1:], "expanded": torch.ones(1).expand(5), "shared": wide}
    torch.save({**CONTENT, "state": {**CONTENT["state"], **state}}, file)
    expected = torch.load(file, weights_only=True)["state"]
    read = read_record(file).state
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert read[name].dtype == value.dtype, name
        assert read[name].shape == value.shape, name
        assert read[name].tolist() == value.tolist(), name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seen": []}, "it has no observations of ranks"),
        ({"seen": [3]}, "its observations of rank 0 are no mapping"),
        ({"seen": [{**OBSERVATION, "rank": 1}]}, "other fields or another rank"),
        ({"seen": [{**OBSERVATION, "more": 1}]}, "other fields or another rank"),
        ({"seen": [{**OBSERVATION, "holds": 3}]}, "its observations of rank 0: local_parameters: Input should be"),
        ({"state": [torch.zeros(2)]}, "its state are no mapping"),
        ({"state": {"w": 3}}, "its state hold something that is no tensor"),
        ({"gradients": {"w": torch.ones(9)}}, "its gradients of w have the shape (9,), unlike the weight"),
        ({"gradients": {"x": torch.ones(9)}}, "its gradients of x have the shape (9,), unlike the weight"),
        ({"gradients_of": {5: {}}}, "no mapping of ranks below 1"),
        ({"loss": None}, "its loss is not a number"),
        ({"loss": torch.zeros(2)}, "its loss is not a number"),
        ({"norm": "x"}, "its norm is not a number"),
        ({"more": 3}, "it has other fields than a recorded step"),
        ({"state": {"w": torch.zeros(1).expand(10**12)}}, "are larger than the file"),
    ],
)
def test_content_that_no_run_records_is_refused(file: Path, change: dict[str, Any], problem: str) -> None:
    torch.save({**CONTENT, **change}, file)
    assert problem in refusal(file)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4", pickle.dumps({"a": 1}), b"\0" * 1000])
def test_a_file_that_is_no_archive_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    refusal(file)


def test_every_cut_and_flipped_byte_is_refused_or_harmless(file: Path) -> None:
    whole = file.read_bytes()
    before = read_record(file)
    for position in range(0, len(whole), 41):
        file.write_bytes(whole[:position])
        refusal(file)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        try:
            after = read_record(file)
        except InputError:
            continue
        assert after.state.keys() == before.state.keys()
        assert all(torch.equal(after.state[name], value) for name, value in before.state.items())
        assert after.observations == before.observations


@pytest.mark.parametrize("what", ["state", "seen", "norm"])
def test_a_pickle_that_calls_a_function_is_refused_without_calling_it(file: Path, tmp_path: Path, what: str) -> None:
    torch.save({**CONTENT, what: _Execute(tmp_path / "executed")}, file)
    assert "it names posix.system" in refusal(file)
    file.write_bytes(pickle.dumps(_Execute(tmp_path / "executed")))  # as torch wrote files before 1.6
    refusal(file)
    assert not (tmp_path / "executed").exists()


def rewrite(file: Path, entry: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Replaces one entry of the archive, with right checksums."""
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith(f"/{entry}"))
    with zipfile.ZipFile(file, "w", compression) as archive:
        for other, old in entries.items():
            archive.writestr(other, content if other == name else old)


def test_a_size_that_the_file_does_not_have_allocates_nothing(file: Path) -> None:
    rewrite(file, "data/1", bytes(4))
    assert "its storage 1 has 4 bytes" in refusal(file)
    torch.save(CONTENT, file)
    rewrite(file, "data/1", bytes(10**6), zipfile.ZIP_DEFLATED)
    assert "its entries are compressed" in refusal(file)
    torch.save(CONTENT, file)
    rewrite(file, "data.pkl", b"\x80\x02K\x01r\xff\xff\xff\x7f.")  # stores an object as number 2**31 - 1 of a list
    refusal(file)
    rewrite(file, "byteorder", b"big")
    assert "another byte order" in refusal(file)


def test_a_missing_file_or_a_folder_is_named(file: Path) -> None:
    assert "No such file" in refusal(file.with_name("step-0002.pt"))
    file.unlink()
    file.mkdir()
    assert "Is a directory" in refusal(file)

"""Tensors and events are read as they were written, and a damaged file is refused."""

from pathlib import Path

import pytest
import torch

from meshwright.audit.recorder.record_files import EventFile, read_events, read_tensors, write_tensors


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_come_back_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tensors = {"a.weight#0": value, "empty": value[:0], "number": value[0, 0], "part": value.t()[1:]}
    write_tensors(tmp_path / "t.safetensors", tensors)
    read = read_tensors(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == dtype for name in tensors)


def test_other_programs_read_the_same_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_tensors(tmp_path / "t.safetensors", {"w": torch.arange(6.0).reshape(2, 3)})
    assert torch.equal(load_file(tmp_path / "t.safetensors")["w"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("kept", [0, 4, 20, 60])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"w": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="damaged"):
        read_tensors(path)


def test_events_are_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path)
    events.write("loss", 1, value=0.5)
    events.write("loss", 2, value=0.25)
    path.write_text(path.read_text()[:-8])
    assert [(event["step"], event["value"]) for event in read_events(path)] == [(1, 0.5)]

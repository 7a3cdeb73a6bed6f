"""The first operator of a forward pass that has other values on a rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.proof.compare.operators import first_different_operator
from meshwright.proof.record.operators import OperatorCall, OperatorRecorder, PartOfTensor, read_calls, write_calls

WHOLE = torch.randn(4, 8, 3, dtype=torch.float64)


def call(value: Tensor, line: str = "model.py, line 7", number: int = 0, **part: object) -> OperatorCall:
    return OperatorCall((line, "roll", "middle", number), (), (PartOfTensor(value, **part),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "part",
    [
        call(WHOLE),
        call(WHOLE[2:]),  # the samples of a rank
        call(WHOLE[:, [0, 1, 6, 7]], divisions=((1, ((0, 2), (6, 2))),)),
        call(WHOLE[:, 4:, 1:], divisions=((1, ((4, 4),)), (2, ((1, 2),)))),
        call(WHOLE * (1 + 1e-13)),
        call(WHOLE[2:].to(torch.complex128)),  # of another type
        call(torch.randn(5, 5)),  # another tensor: it cannot be compared
        call(WHOLE + 1, line="model.py, line 8"),  # a line that one device does not run
    ],
)
def test_parts_of_the_same_values_are_the_same(part: OperatorCall) -> None:
    assert first_different_operator([call(WHOLE)], [[part]], 1) is None


@pytest.mark.parametrize(
    "part",
    [
        call(WHOLE * (1 + 1e-6)),
        call(WHOLE[2:].flip(0)),
        call(WHOLE[:, [0, 1, 2, 3]], divisions=((1, ((0, 2), (6, 2))),)),
    ],
)
def test_other_values_are_named_with_module_line_and_rank(part: OperatorCall) -> None:
    found = first_different_operator([call(WHOLE)], [[call(WHOLE)], [part]], 1)
    assert found == "the result of roll of middle (model.py, line 7) is the first value that differs, on rank 1"


def test_of_several_groups_the_first_is_compared() -> None:
    whole = [call(WHOLE), call(WHOLE + 1, number=1)]
    rank = [call(WHOLE), call(WHOLE + 2, number=1)]
    assert first_different_operator(whole, [rank], 2) is None
    assert first_different_operator(whole, [rank], 1) is not None


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] = 0.5
        return torch.utils.checkpoint.checkpoint(torch.tanh, y.clone(), use_reentrant=False)


def test_calls_of_the_model_itself_are_recorded_once_with_what_they_write() -> None:
    model = nn.Sequential(Written())
    with OperatorRecorder() as recorder:
        model(torch.ones(2, 3)).sum().backward()
    inside = [call for call in recorder.calls if call.place[2] == "0"]
    assert [call.place[1] for call in inside] == ["__setitem__", "clone"]
    written = inside[0].results[0]
    assert written is not None
    assert written.value[:, 0].tolist() == [0.5, 0.5]
    assert not torch.equal(inside[0].arguments[0].value, written.value)  # type: ignore[union-attr]


def test_complex_values_are_compared() -> None:
    whole, conjugated = torch.complex(WHOLE, WHOLE), torch.complex(WHOLE, -WHOLE)
    assert first_different_operator([call(whole)], [[call(whole[1:])]], 1) is None
    assert first_different_operator([call(whole)], [[call(conjugated)]], 1) is not None


def test_what_a_rank_has_written_is_read_again(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with OperatorRecorder() as recorder:
        torch.fft.fft(x).conj()
        x.sort(1)
    write_calls(recorder, tmp_path / "calls.pt")
    calls = read_calls(tmp_path / "calls.pt")
    assert [call.place[1] for call in calls] == ["fft_fft", "conj", "sort"]
    assert calls[-1].results[1] is None  # indices
    assert first_different_operator(recorder.calls, [calls], 1) is None

"""Which layers are quantized, and that an exported program of them runs on any batch size."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.export.program import LoadedProgram, write_program
from meshwright.export.quantize import quantize
from tests.train.one_process import toy_job


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 64, 5)
        self.back = nn.ConvTranspose1d(64, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8 * 18, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.back(self.conv(x[:, None]).relu())).flatten(1))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(20, 2, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x[:, None])[:, 0, :5]
        return out


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(20, generator=torch.Generator().manual_seed(index)), index


@pytest.mark.parametrize(
    ("make", "dynamic"),
    [
        (Convolutions, False),
        (Attention, True),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [(Convolutions, True), (Attention, False)]),
        *((lambda: nn.Linear(20, 5), dynamic) for dynamic in (False, True)),
    ],
)
def test_an_int8_program_is_close_to_the_model(make: type[nn.Module], dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    quantized = quantize(model, "int8", dynamic)
    write_program(quantized, toy_job(), Points(), tmp_path / "it.pt2")
    program = LoadedProgram(tmp_path / "it.pt2")
    with torch.no_grad():
        for samples in (1, 2, 4, 33):
            x = torch.randn(samples, 20)
            torch.testing.assert_close(program(x), quantized(x), rtol=1e-5, atol=1e-5)
            assert float((program(x) - model(x)).abs().max()) < 0.05 * float(model(x).abs().max())
    exported = torch.export.load(tmp_path / "it.pt2")
    matrices = [
        v for v in (*exported.state_dict.values(), *exported.constants.values()) if v.dim() > 1 and v.numel() > 64
    ]
    assert matrices
    assert {matrix.dtype for matrix in matrices} == {torch.int8}

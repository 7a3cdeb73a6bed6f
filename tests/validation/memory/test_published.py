"""Published peaks of memory are predicted from shapes, and every published row is covered or says why it is not."""

from statistics import median

import pytest
import torch
from torch import nn

from meshwright.profile.tracing.trace import trace_profile
from validation.memory.published import MemoryRow, main, outcomes, reasons, rows, summary
from validation.segmentation.backbones.resnet import ResNet
from validation.segmentation.era import dropout, log_softmax, softmax
from validation.segmentation.workspaces import with_workspaces

MEDIAN = 0.05
A_FEW = {
    "mmseg_memory-0150": "FCN, peak in the loss",
    "mmseg_memory-0319": "PSPNet, peak in a convolution's workspace",
    "mmseg_memory-0353": "Segmenter, a transformer",
}


def chosen(ids: dict[str, str]) -> list[MemoryRow]:
    return [row for row in rows() if row.id in ids]


def test_every_row_is_covered_or_left_out_for_a_reason() -> None:
    found = rows()
    assert len({row.id for row in found}) == len(found) == 514
    assert all((row.model is None) != (row.left_out is None) for row in found)
    covered = [row for row in found if row.model is not None]
    assert all(row.batch > 0 and row.gpus > 0 and row.measured_gib > 0 and min(row.size) > 0 for row in covered)
    assert reasons(found).total() == len(found) - len(covered)


@pytest.mark.soak
def test_a_few_rows_are_within_the_rounding_of_their_figures() -> None:
    found = outcomes(chosen(A_FEW))
    assert len(found) == len(A_FEW)
    for outcome in found:
        assert abs(outcome.error) < MEDIAN, (outcome.row.name, outcome.row.measured_gib, outcome.predicted_gib)


def test_the_bench_prints_families_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    main(["detectron2_zoo"])
    printed = capsys.readouterr().out
    assert "left out: 52 rows" in printed
    assert "shapes come from its pictures" in printed


def test_operators_of_the_time_compute_what_todays_do() -> None:
    scores = torch.randn(3, 5, dtype=torch.double, requires_grad=True)
    for then, now in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        assert torch.equal(then(scores, 1), now(scores, 1))
        assert torch.autograd.gradcheck(lambda x, call=then: call(x, 1), scores)
    assert torch.equal(dropout(scores, 0.0), scores)


def test_models_of_torchvision_have_as_many_parameters() -> None:
    with torch.device("meta"):
        own = sum(p.numel() for p in ResNet(50, 32, deep_stem=False).parameters())
    assert own == 25_557_032 - 2048 * 1000 - 1000  # torchvision's ResNet-50 without its classifier


def test_a_workspace_is_borrowed_by_3x3_convolutions_only() -> None:
    with torch.device("meta"):
        plain, dilated = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        sample = {"input": torch.zeros(2, 8, 8, 8)}
    for conv, expected in ((plain, 36 * (4 * (8 + 16) + 8 * 16) * 4), (dilated, 0)):
        model = Summed(conv)
        before = trace_profile(model, sample, None)
        after = with_workspaces(before, model)
        taken = [
            change.bytes.at(1)
            for old, new in zip(before.segments, after.segments, strict=True)
            for change in new.changes
            if change not in old.changes and change.bytes.at(1) > 0 and new.phase == "forward"
        ]
        assert sum(taken) == expected


class Summed(nn.Module):
    """A model that returns its loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.layer(input).sum()
        return total


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_eighth_row() -> None:
    """All of them take 25 minutes: `python -m validation.memory.published`."""
    found = outcomes(rows()[::8])
    told = summary(found)
    assert told["rows"] >= 40
    assert median(abs(outcome.error) for outcome in found) <= MEDIAN, told

"""Published peaks of memory are predicted, and every published row has a model or the reason why it has none."""

import pytest
import torch
from torch import nn

from meshwright.profile.tracing.trace import trace_profile
from validation.memory.published import MemoryRow, count_reasons, main, predict_rows, rows
from validation.segmentation.backbones.resnet import ResNet
from validation.segmentation.era import dropout, log_softmax, softmax
from validation.segmentation.workspaces import with_workspaces

LARGEST_ERROR = 0.05
SOME_ROWS = {
    "mmseg_memory-0150": "FCN, peak in the loss",
    "mmseg_memory-0319": "PSPNet, peak in a convolution's workspace",
    "mmseg_memory-0353": "Segmenter, a transformer",
}


def rows_with_ids(ids: dict[str, str]) -> list[MemoryRow]:
    return [row for row in rows() if row.id in ids]


def test_every_row_is_covered_or_left_out_for_a_reason() -> None:
    all_rows = rows()
    assert len({row.id for row in all_rows}) == len(all_rows)
    assert all((row.model is None) != (row.left_out is None) for row in all_rows)
    covered = [row for row in all_rows if row.model is not None]
    assert {row.id for row in rows_with_ids(SOME_ROWS)} == set(SOME_ROWS)
    assert all(row.batch > 0 and row.gpus > 0 and row.measured_gib > 0 and min(row.size) > 0 for row in covered)
    assert count_reasons(all_rows).total() == len(all_rows) - len(covered)


@pytest.mark.soak
def test_a_few_rows_are_within_the_rounding_of_their_figures() -> None:
    predictions = predict_rows(rows_with_ids(SOME_ROWS))
    assert len(predictions) == len(SOME_ROWS)
    for prediction in predictions:
        figures = (prediction.row.name, prediction.row.measured_gib, prediction.predicted_gib)
        assert abs(prediction.error) < LARGEST_ERROR, figures


def test_the_command_prints_families_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    main(["detectron2_zoo"])
    printed = capsys.readouterr().out
    assert "left out: 0 rows" not in printed
    assert "shapes come from its pictures" in printed


def test_operators_of_old_torch_compute_the_same_as_those_of_today() -> None:
    scores = torch.randn(3, 5, dtype=torch.double, requires_grad=True)
    for old, new in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        assert torch.equal(old(scores, 1), new(scores, 1))
        assert torch.autograd.gradcheck(lambda x, call=old: call(x, 1), scores)
    assert torch.equal(dropout(scores, 0.0), scores)


def test_models_of_torchvision_have_as_many_parameters() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in ResNet(50, 32, deep_stem=False).parameters())
    assert parameters == 25_557_032 - 2048 * 1000 - 1000  # torchvision's ResNet-50 without its classifier


def test_only_3x3_convolutions_without_dilation_have_a_workspace() -> None:
    with torch.device("meta"):
        plain, dilated = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        sample = {"input": torch.zeros(2, 8, 8, 8)}
    for conv, expected in ((plain, 36 * (4 * (8 + 16) + 8 * 16) * 4), (dilated, 0)):
        model = Summed(conv)
        before = trace_profile(model, sample, None)
        after = with_workspaces(before, model)
        allocated = [
            change.bytes.at(1)
            for old, new in zip(before.segments, after.segments, strict=True)
            for change in new.changes
            if change not in old.changes and change.bytes.at(1) > 0 and new.phase == "forward"
        ]
        assert sum(allocated) == expected


class Summed(nn.Module):
    """A model that returns its loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.layer(input).sum()
        return total

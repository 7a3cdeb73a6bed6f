"""The rule for the workspaces of convolutions agrees with workspaces that were measured on a GPU."""

from statistics import median

from validation.memory.convolution_workspaces import WorkspaceComparison, compare, rows

# The library pads the three channels of an image to what its kernels need, which the rule does not cover.
FIRST_LAYER_CHANNELS = 3


def comparisons(channels_last: bool) -> list[WorkspaceComparison]:
    """All comparisons of this layout, except those of the first layer of a network."""
    inner = [row for row in rows() if row["channels_last"] == channels_last and row["shape"][1] != FIRST_LAYER_CHANNELS]
    return [comparison for row in inner for comparison in compare(row)]


def test_contiguous_images_and_filters_need_a_workspace_of_their_size() -> None:
    with_rule = [comparison for comparison in comparisons(channels_last=False) if comparison.rule]
    assert median(abs(comparison.rule / comparison.measured - 1) for comparison in with_rule) < 0.02
    assert sum(comparison.agrees for comparison in with_rule) >= 0.85 * len(with_rule)


def test_1x1_filters_on_rows_of_whole_16_bytes_need_no_workspace() -> None:
    without_rule = [comparison for comparison in comparisons(channels_last=False) if not comparison.rule]
    assert {comparison.shape[4:] for comparison in without_rule} == {(1, 1)}
    assert all(comparison.measured <= 0.05 * comparison.tensors for comparison in without_rule)


def test_channels_last_images_need_almost_no_workspace() -> None:
    channels_last = comparisons(channels_last=True)
    assert all(comparison.rule == 0 for comparison in channels_last)
    assert median(comparison.measured / comparison.tensors for comparison in channels_last) < 0.02

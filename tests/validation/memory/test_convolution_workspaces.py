"""The rule for what convolutions take beside their tensors, against what a GPU was seen to take."""

from statistics import median

from validation.memory.convolution_workspaces import WorkspaceComparison, compare, rows

FIRST_LAYER = 3  # channels of a picture, which the library fills up to what its kernels take: the rule leaves that out


def compared(channels_last: bool) -> list[WorkspaceComparison]:
    """Without a network's first layer."""
    chosen = [row for row in rows() if row["channels_last"] == channels_last and row["shape"][1] != FIRST_LAYER]
    return [one for row in chosen for one in compare(row)]


def test_contiguous_images_and_filters_are_taken_once_more() -> None:
    found = [one for one in compared(channels_last=False) if one.rule]
    assert len(found) >= 30
    assert median(abs(one.rule / one.taken - 1) for one in found) < 0.02
    assert sum(one.agrees for one in found) >= 0.85 * len(found)


def test_single_pixels_on_whole_loads_take_nothing() -> None:
    found = [one for one in compared(channels_last=False) if not one.rule]
    assert {one.shape[4:] for one in found} == {(1, 1)}
    assert all(one.taken <= 0.05 * one.tensors for one in found)


def test_channels_last_takes_next_to_nothing() -> None:
    found = compared(channels_last=True)
    assert all(one.rule == 0 for one in found)
    assert median(one.taken / one.tensors for one in found) < 0.02

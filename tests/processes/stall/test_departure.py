"""A rank that waits for one that has left its loop says so, and after how many steps."""

import re

import pytest
import torch.distributed as dist

from meshwright.processes.stall.departure import Departure, describe_departure, find_departure, tell_departure

LEFT = "rank 1 has left its loop after"


@pytest.mark.parametrize(
    ("left", "steps", "is_in_step", "line"),
    [
        (Departure(1, 3), 3, True, rf"{LEFT} 3 steps, and rank 0 waits for it in step 4 \(backward\): .* same number"),
        (Departure(1, 1), 3, False, f"{LEFT} 1 step, and rank 0 waits for it: all ranks must make the same number"),
        (Departure(1, 3), 3, False, f"{LEFT} 3 steps, .* in a call that all ranks must make: call the session's"),
        (Departure(1, 2, "ValueError: x"), 2, True, "rank 1 has ended after 2 steps with ValueError: x; rank 0 waits"),
    ],
)
def test_the_line(left: Departure, steps: int, is_in_step: bool, line: str) -> None:
    assert re.match(line, describe_departure(left, 0, steps, "backward", is_in_step=is_in_step))


def test_the_rank_that_left_first_is_named_and_not_one_that_failed_because_of_it() -> None:
    store = dist.HashStore()
    assert find_departure(store, 2, 4, waits=False) is None
    tell_departure(store, Departure(2, 9))
    assert find_departure(store, 2, 4, waits=False) is None, "the rank itself"
    tell_departure(store, Departure(0, 4, "CollectiveError: rank 3 has left"))
    tell_departure(store, Departure(3, 4))
    assert find_departure(store, 2, 4, waits=False) == Departure(3, 4)
